/* R + 1 rows become R: the decision, and what it makes of the rows and of their Gram matrix (design/low_rank.py,
 * `shortened`), for low_rank.c.
 *
 * Where a drift scales all rows alike, the Gram matrix is carried from token to token, since products of rows of D
 * numbers cost more than all else; low_rank.c computes it from the rows every C tokens, and whenever `choose` asks. */
#ifndef SHORTEN_H
#define SHORTEN_H
#include <float.h>

#include "rows.h"

#define EPSILON (sizeof(REAL) == sizeof(float) ? (REAL)FLT_EPSILON : (REAL)DBL_EPSILON)

/* How R + 1 rows became R, as one piece of memory: row, total, then q [n], and L^-1 [R,R] for LL' the system of all
 * rows but the dropped one, in whose place stands w. */
#define DOUBTFUL (REAL)1e-3 /* pivots, as shares of the trace, for which an updated Gram matrix is not good enough */
enum { ROW = 0, TOTAL = 1, Q = 2 };
enum { KEPT = -1 }; /* in place of ROW: w was zero, and W stays; below it, -2 - i: w took the free row i */

/* What decides how n rows become one less: products of the rows, [R,ld], and of w with them, [ld]; all else is room. */
typedef struct {
  REAL *gram, *products, w2;
  REAL *A, *Y, *inverse, *border, *q; /* [n,ld], [n,ld], [n], [ld], [ld] */
} Choice;

/* The regularised Gram matrix of the rows, with w in place of row `left_out` (none if R), in shares of `total`. */
static void system_of(int64_t R, int64_t left_out, const Choice *o, REAL share, REAL *A) {
  const int64_t ld = padded(R);
  const REAL rounding = 4 * (R + 1) * EPSILON;
  EACH(i, R) {
    const REAL *row = i == left_out ? o->products : o->gram + i * ld;
    SIMD EACH(j, ld) A[i * ld + j] = share * row[j];
    if (left_out < R) A[i * ld + left_out] = share * (i == left_out ? o->w2 : o->products[i]);
    A[i * ld + i] += rounding;
  }
}

/* Decide how R rows and w become R. With `exact` unset, the Gram matrix carries roundings of earlier tokens: return 0
 * if they could matter. `saves`: also leave what backward needs. */
static int choose(int64_t R, int exact, int saves, const Choice *o, REAL *turn) {
  const int64_t n = R + 1, ld = padded(R);
  const REAL *gram = o->gram;
  REAL *A = o->A, *Y = o->Y, *inverse = o->inverse, total = o->w2;
  EACH(i, R) total += gram[i * ld + i];
  const REAL share = total > 0 ? 1 / total : 0, rounding = 4 * n * EPSILON;
  EACH(i, R) {
    if (!exact && !(gram[i * ld + i] * share > DOUBTFUL)) return 0;
    if (gram[i * ld + i] != 0) continue;
    turn[ROW] = -2 - i;
    return 1;
  }
  if (o->w2 == 0) {
    turn[ROW] = KEPT;
    return 1;
  }
  system_of(R, R, o, share, A);
  SIMD EACH(j, ld) A[R * ld + j] = share * o->products[j];
  const REAL smallest = small_eliminate(A, Y, inverse, o->border, R, n, ld);
  REAL last = share * o->w2 + rounding; /* what the others leave of w */
  EACH(j, R) last -= o->border[j] * o->border[j] * inverse[j];
  if (!exact && !(least_of(smallest, last) > DOUBTFUL)) return 0;
  inverse[R] = 1 / (last > 0 ? last : 1);
  /* the row that has the largest entry on the diagonal of the inverse, and its column y there: q = y/|y| */
  REAL *q = o->q, *diagonal = A + R * ld;
  memset(diagonal, 0, ld * sizeof(REAL));
  EACH(i, n) {
    const REAL c = inverse[i];
    SIMD EACH(j, ld) diagonal[j] += c * Y[i * ld + j] * Y[i * ld + j];
  }
  int64_t row = 0;
  for (int64_t i = 1; i < R; i++) if (diagonal[i] > diagonal[row]) row = i;
  if (inverse[R] > diagonal[row]) row = R;
  memset(q, 0, ld * sizeof(REAL));
  REAL corner = 0;
  for (int64_t i = row; i < n; i++) {
    corner = inverse[i] * (row < R ? Y[i * ld + row] : 1);
    small_subtract(q, -corner, Y + i * ld, ld);
  }
  const REAL whole = 1 / (row < R ? q[row] : corner);
  REAL *to = turn + Q, squares = 0;
  EACH(j, R) to[j] = j == row ? 1 : whole * q[j];
  to[R] = row == R ? 1 : whole * corner;
  EACH(j, n) squares += to[j] * to[j];
  const REAL length = (to[R] > 0 ? -1 : 1) / (REAL)sqrt(squares);
  EACH(j, n) to[j] *= length;
  turn[ROW] = row, turn[TOTAL] = total;
  if (!saves) return 1;
  if (row < R) {
    system_of(R, row, o, share, A);
    small_eliminate(A, Y, inverse, NULL, R, R, ld);
  }
  EACH(i, R) {
    const REAL root = (REAL)sqrt(inverse[i]);
    REAL *restrict factor = to + n + i * R;
    EACH(j, R) factor[j] = root * Y[i * ld + j];
  }
  return 1;
}

/* The Gram matrix of the rows that `shorten` makes: those of F plus q e', e = (w - d)/(1 - q_R). */
static void shorten_gram(int64_t R, const REAL *turn, const Choice *o) {
  const int64_t ld = padded(R), row = (int64_t)turn[ROW];
  const REAL *from = turn + Q, scale = 1 / (1 - from[R]);
  REAL *gram = o->gram, *restrict q = o->q, *restrict f = o->A, *products = o->products;
  if (row == KEPT) return;
  if (row < 0) {
    const int64_t i = -2 - row;
    memcpy(gram + i * ld, products, ld * sizeof(REAL));
    EACH(j, R) gram[j * ld + i] = products[j];
    gram[i * ld + i] = o->w2;
    return;
  }
  memcpy(q, from, R * sizeof(REAL));
  memset(q + R, 0, (ld - R) * sizeof(REAL));
  /* f = F e and (w e) from products of all rows with c, where e = sum of c_i F_i */
  memset(f, 0, ld * sizeof(REAL));
  EACH(i, R) small_subtract(f, scale * q[i], gram + i * ld, ld);
  small_subtract(f, -1, products, ld); /* c_R = 1, since e = (w - d)/(1 - q_R) */
  const REAL along = o->w2 - scale * dot(q, products, R), squares = along - scale * dot(q, f, R);
  EACH(i, R) {
    REAL *restrict to = gram + i * ld;
    const REAL one = q[i], two = f[i] + squares * q[i];
    SIMD EACH(j, ld) to[j] += one * f[j] + two * q[j];
  }
}

/* W from F = fade `from` and w: F_i + q_i e with e = w - sum of q_i F_i/(1 - q_R), which is (w - d)/(1 - q_R).
 * W may be `from`. */
static void shorten(int64_t R, int64_t D, REAL fade, const REAL *from, const REAL *w, const REAL *turn, REAL *W) {
  const REAL *q = turn + Q, scale = 1 / (1 - q[R]);
  int64_t row = (int64_t)turn[ROW], j = 0;
  if (row < 0) {
    if (W != from || fade != 1) EACH(i, R) SIMD EACH(l, D) W[i * D + l] = fade * from[i * D + l];
    if (row != KEPT) memcpy(W + (-2 - row) * D, w, D * sizeof(REAL));
    return;
  }
  for (; j + 4 * LANES <= D; j += 4 * LANES) {
    vec e[4];
    _Pragma("GCC unroll 4") EACH(h, 4) e[h] = *(const vec *)(w + j + h * LANES);
    EACH(i, R) {
      const REAL c = -fade * scale * q[i];
      _Pragma("GCC unroll 4") EACH(h, 4) e[h] += c * *(const vec *)(from + i * D + j + h * LANES);
    }
    EACH(i, R) {
      const REAL qi = q[i];
      _Pragma("GCC unroll 4") EACH(h, 4)
        *(vec *)(W + i * D + j + h * LANES) = fade * *(const vec *)(from + i * D + j + h * LANES) + qi * e[h];
    }
  }
  for (; j < D; j++) {
    REAL e = w[j];
    EACH(i, R) e -= fade * scale * q[i] * from[i * D + j];
    EACH(i, R) W[i * D + j] = fade * from[i * D + j] + q[i] * e;
  }
}

static int64_t turn_elements(int64_t R) { return Q + R + 1 + R * R; }
static int64_t choice_elements(int64_t R) { return (3 * R + 10) * (padded(R) + 16); }

static Choice choice_room(int64_t R, REAL **work) {
  const int64_t ld = padded(R);
  Choice o = {.gram = take(work, (R + 3) * ld), .products = take(work, ld)};
  o.A = take(work, (R + 1) * ld), o.Y = take(work, (R + 1) * ld);
  o.inverse = take(work, R + 1), o.border = take(work, ld), o.q = take(work, ld);
  return o;
}
#endif
