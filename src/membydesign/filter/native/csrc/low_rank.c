/* The gains of a low-rank covariance, token by token: the formulas of design/low_rank.py, in C, for a prior of 1.
 *
 *     F = W A',   h = F k,   u = k - F'h,   b = 1/(r2 + k'u),   w = sqrt(b) u,   W = shortened(F; w)
 *
 * `shortened` drops nothing while a row is free. Otherwise, with i the row of (F; w) that the others explain best and
 * y = e_i - x, x its regression on them, q = y/|y| (q_R <= 0):
 *
 *     d = (F; w)'q,   e = (w - d)/(1 - q_R),   W_j = F_j + q_j e
 *
 * The rows of a pair that turns come de-interleaved. Heads run in parallel. Forward saves W before every C tokens, and
 * for each token q and the Cholesky factor of the regression; backward computes the W between anew.
 */
#include <float.h>

#include "frame.h"
#include "layout.h"
#include "rows.h"

#define EPSILON (sizeof(REAL) == sizeof(float) ? (REAL)FLT_EPSILON : (REAL)DBL_EPSILON)

#define INPUTS(X)                                                                   \
  X(INT, T) X(INT, H) X(INT, G) X(INT, D)                                           \
  X(INT, R)             /* rows of W */                                             \
  X(INT, decays)        /* of a token: 1 for all rows, D, or D/2 for pairs */       \
  X(INT, rotates)       /* whether drift turns pairs of rows */                     \
  X(INT, C)             /* tokens between two W that are saved */                   \
  X(READ, k)            /* [B,T,H,D] */                                             \
  X(READ_OR_NULL, x)    /* queries, [B,T,H,D] */                                    \
  X(READ, r2)           /* [B,T,H,G] */                                             \
  X(READ, a)            /* decays, [B,T,H,decays] */                                \
  X(READ_OR_NULL, cos)  /* of each turn, [B,T,H,D/2] */                             \
  X(READ_OR_NULL, sin)
STRUCT(Inputs, INPUTS)

#define OUTPUTS(X)                                                                  \
  X(WRITE, u) X(WRITE, b)    /* [B,T,H,G,D], [B,T,H,G] */                           \
  X(WRITE_OR_NULL, variance) /* [B,T,H,G] */                                        \
  X(WRITE, W)                /* in: before the first token, out: after the last; [B,H,G,R,D] */ \
  X(WRITE_OR_NULL, saved)    /* W before tokens 0, C, …: [B,H,G,K,R D] */           \
  X(WRITE_OR_NULL, turns)    /* `Turn` of every token: [B,T,H,G,turn_elements] */
STRUCT(Outputs, OUTPUTS)

#define GRADIENTS(X)                                                                \
  X(READ, saved_u) X(READ, saved_b) X(READ, saved) X(READ, turns) /* as forward left them */ \
  X(READ, u) X(READ, b) X(READ_OR_NULL, variance) /* gradients of the outputs */    \
  X(WRITE, W)                                     /* in: gradient of W at the end, out: at the start */ \
  X(WRITE, k) X(WRITE, r2) X(WRITE, log_a)        /* of the inputs, zero at first */ \
  X(WRITE_OR_NULL, x) X(WRITE_OR_NULL, angle)     /* likewise, if there are such inputs */
STRUCT(Gradients, GRADIENTS)

/* How R + 1 rows became R, as one piece of memory: row, total, then q [n], and L^-1 [R,R] for LL' the system of all
 * rows but the dropped one, in whose place stands w. */
#define DOUBTFUL (REAL)1e-3 /* pivots, as shares of the trace, for which an updated Gram matrix is not good enough */
enum { ROW = 0, TOTAL = 1, Q = 2 };
enum { KEPT = -1 }; /* in place of ROW: w was zero, and W stays; below it, -2 - i: w took the free row i */

/* The decays of all rows, and the turns of pairs. */
INLINE void decays_of(const Inputs *x, int64_t at, REAL *restrict a) {
  const int64_t each = x->decays, D = x->D;
  const REAL *from = x->a + at * each, first = from[0];
  if (each == 1) {
    SIMD EACH(j, D) a[j] = first;
  } else {
    for (int64_t i = 0; i < D; i += each) memcpy(a + i, from, each * sizeof(REAL));
  }
}

INLINE void turn_row(const Inputs *x, int64_t at, REAL *restrict row, REAL sign) {
  int64_t half = x->D / 2;
  const REAL *restrict c = x->cos + at * half, *restrict s = x->sin + at * half;
  REAL *restrict lower = row + half;
  SIMD EACH(i, half) {
    REAL real = row[i], imaginary = lower[i];
    row[i] = c[i] * real - sign * s[i] * imaginary;
    lower[i] = sign * s[i] * real + c[i] * imaginary;
  }
}

/* F = W A'; F may be W. */
static void drift(const Inputs *x, int64_t at, const REAL *restrict a, const REAL *W, REAL *F) {
  int64_t D = x->D;
  EACH(i, x->R) {
    REAL *to = F + i * D;
    const REAL *from = W + i * D;
    SIMD EACH(j, D) to[j] = a[j] * from[j];
    if (x->rotates) turn_row(x, at, to, 1);
  }
}

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

/* Decide how R rows and w become R. With `exact` unset, the Gram matrix carries roundings of earlier tokens: return 0 if
 * they could matter. `saves`: also leave what backward needs. */
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

/* W from F = fade W' and w: F_i + q_i e with e = w - sum of q_i F_i/(1 - q_R), which is (w - d)/(1 - q_R). `from` may be
 * W. */
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
static int64_t choose_elements(int64_t R) { return (3 * R + 10) * (padded(R) + 16); }

static void forward_head(const Inputs *x, const Outputs *y, int64_t head, REAL *work) {
  int64_t T = x->T, H = x->H, G = x->G, D = x->D, R = x->R, C = x->C, K = (T + C - 1) / C, each = turn_elements(R);
  const int64_t ld = padded(R);
  const int keeps = x->decays == 1 && !x->rotates; /* a drift that scales the Gram matrix */
  REAL *a = take(&work, D), *restrict w = take(&work, D), *h = take(&work, ld), *along = take(&work, ld);
  REAL *W = take(&work, (R + 3) * D), *own = take(&work, each);
  Choice o = {.gram = take(&work, (R + 3) * ld), .products = take(&work, ld)};
  o.A = take(&work, (R + 1) * ld), o.Y = take(&work, (R + 1) * ld);
  o.inverse = take(&work, R + 1), o.border = take(&work, ld), o.q = take(&work, ld);
  memset(W, 0, (R + 3) * D * sizeof(REAL));
  EACH(g, G) {
    REAL *rows = y->W + (head * G + g) * R * D;
    memcpy(W, rows, R * D * sizeof(REAL));
    EACH(t, T) {
      int64_t at = ((head / H) * T + t) * H + head % H, out = at * G + g;
      const REAL *k = x->k + at * D, fade = keeps ? x->a[at] : 1;
      REAL *restrict u = y->u + out * D, *turn = y->turns ? y->turns + out * each : own;
      if (y->saved && t % C == 0) memcpy(y->saved + ((head * G + g) * K + t / C) * R * D, W, R * D * sizeof(REAL));
      if (!keeps) {
        decays_of(x, at, a);
        drift(x, at, a, W, W);
      }
      int exact = !keeps || t % C == 0;
      if (exact) whole_gram(R, D, W, o.gram, ld);
      rows_times(R, D, W, k, along);
      EACH(i, R) h[i] = -fade * fade * along[i]; /* F'F k = fade^2 W'W k */
      memcpy(u, k, D * sizeof(REAL));
      rows_sum(R, D, h, W, u);
      const REAL b = y->b[out] = 1 / (x->r2[out] + dot(k, u, D)), root = (REAL)sqrt(b > 0 ? b : 0);
      SIMD EACH(j, D) w[j] = root * u[j];
      o.w2 = dot(w, w, D);
      for (;;) { /* F w = root fade (W k + gram h), with the gram of W, and then that of F */
        memset(o.products, 0, ld * sizeof(REAL));
        memcpy(o.products, along, R * sizeof(REAL));
        EACH(i, R) small_subtract(o.products, -h[i], o.gram + i * ld, ld);
        SIMD EACH(j, ld) o.products[j] *= root * fade;
        EACH(i, R) SIMD EACH(j, ld) o.gram[i * ld + j] *= fade * fade;
        if (choose(R, exact, y->turns != NULL, &o, turn)) break;
        whole_gram(R, D, W, o.gram, ld);
        exact = 1;
      }
      if (keeps) shorten_gram(R, turn, &o);
      shorten(R, D, fade, W, w, turn, W);
      if (y->variance) {
        const REAL *q = x->x + at * D;
        rows_times(R, D, W, q, h);
        REAL variance = dot(q, q, D) - dot(h, h, R);
        y->variance[out] = variance > 0 ? variance : 0;
      }
    }
    memcpy(rows, W, R * D * sizeof(REAL));
  }
}

typedef struct {
  REAL *a, *d, *e, *de, *du, *y, *z; /* [D] */
  REAL *h, *dq, *p;                  /* [R + 1] */
  REAL *F;                           /* [R + 1,D] */
} Back;

/* Back through `shorten` and `choose`: dW [R,D] becomes the gradient of F, dw that of w. */
static void shorten_back(int64_t R, int64_t D, const REAL *F, const REAL *turn, REAL *dW, REAL *restrict dw, const Back *o) {
  int64_t row = (int64_t)turn[ROW], n = R + 1;
  const REAL *q = turn + Q, *factor = q + n, *restrict w = F + R * D;
  REAL *restrict d = o->d, *restrict e = o->e, *restrict de = o->de, *dq = o->dq, *p = o->p;
  memset(dw, 0, D * sizeof(REAL));
  if (row < 0) {
    if (row == KEPT) return;
    memcpy(dw, dW + (-2 - row) * D, D * sizeof(REAL));
    memset(dW + (-2 - row) * D, 0, D * sizeof(REAL));
    return;
  }
  const REAL scale = 1 / (1 - q[R]), total = turn[TOTAL], qi = q[row];
  memset(d, 0, D * sizeof(REAL));
  rows_sum(n, D, q, F, d);
  SIMD EACH(j, D) e[j] = (w[j] - d[j]) * scale;
  rows_times(R, D, dW, e, dq);
  memset(de, 0, D * sizeof(REAL));
  rows_sum(R, D, q, dW, de);
  dq[R] = scale * dot(de, e, D);
  SIMD EACH(j, D) de[j] *= -scale; /* now the gradient of d */
  rows_times(n, D, F, de, p);
  EACH(i, n) dq[i] += p[i];
  /* y = e_row - x with y_row = 1, q = +-y/|y| */
  REAL along = dot(q, dq, n);
  EACH(i, n) p[i] = i == row ? 0 : -qi * (dq[i] - q[i] * along);
  p[row] = p[R]; /* w stands in the dropped row's place */
  rows_times(R, R, factor, p, dq);
  memset(p, 0, n * sizeof(REAL));
  rows_sum(R, R, dq, factor, p);
  if (row < R) p[R] = p[row];
  p[row] = 0;
  REAL *restrict y = o->y, *restrict z = o->z;
  memset(z, 0, D * sizeof(REAL));
  rows_sum(n, D, p, F, z);
  SIMD EACH(j, D) y[j] = d[j] / qi;
  const REAL share = 1 / total, whole = -2 * dot(y, z, D) * share * share;
  EACH(i, n) {
    REAL *restrict to = i < R ? dW + i * D : dw;
    const REAL *restrict f = F + i * D, one = q[i], two = p[i] * share, three = q[i] / qi * share;
    SIMD EACH(j, D) to[j] += one * de[j] + two * y[j] + three * z[j] + whole * f[j];
  }
  SIMD EACH(j, D) dw[j] -= de[j];
}

/* One token back: W before it, and F after its drift; dW is the gradient of W after it, and then before it. */
static void token_back(const Inputs *x, const Gradients *o, int64_t at, int64_t g, const REAL *after, REAL *dW, Back *r) {
  int64_t D = x->D, R = x->R, half = D / 2, out = at * x->G + g;
  const REAL *restrict k = x->k + at * D, *restrict u = o->saved_u + out * D, *restrict from_u = o->u + out * D;
  const REAL b = o->saved_b[out], root = (REAL)sqrt(b > 0 ? b : 0), dv = o->variance ? o->variance[out] : 0;
  REAL *restrict dk = o->k + at * D, *restrict du = r->du, *h = r->h, *F = r->F;
  if (dv != 0) {
    const REAL *q = x->x + at * D;
    REAL *dq = o->x + at * D;
    rows_times(R, D, after, q, h);
    if (dot(q, q, D) - dot(h, h, R) > 0) {
      EACH(i, R) h[i] *= -2 * dv;
      add(dq, 2 * dv, q, D);
      rows_sum(R, D, h, after, dq);
      EACH(i, R) add(dW + i * D, h[i], q, D);
    }
  }
  shorten_back(R, D, F, o->turns + out * turn_elements(R), dW, du, r); /* du: the gradient of w = sqrt(b) u */
  REAL db = o->b[out] + (root > 0 ? dot(du, u, D) / (2 * root) : 0);
  const REAL ds = -b * b * db; /* s = r2 + k'u = 1/b */
  o->r2[out] += ds;
  SIMD EACH(j, D) du[j] = root * du[j] + from_u[j] + ds * k[j];
  SIMD EACH(j, D) dk[j] += du[j] + ds * u[j];
  rows_times(R, D, F, k, h);
  rows_times(R, D, F, du, r->p);
  EACH(i, R) r->p[i] = -r->p[i];
  rows_sum(R, D, r->p, F, dk);
  REAL *restrict net = r->d, *restrict turned = r->e;
  memset(net, 0, D * sizeof(REAL));
  memset(turned, 0, D * sizeof(REAL));
  EACH(i, R) {
    REAL *restrict d = dW + i * D;
    const REAL *restrict f = F + i * D, *restrict a = r->a, hi = h[i], pi = r->p[i];
    if (!x->rotates) {
      SIMD EACH(j, D) {
        const REAL df = d[j] - hi * du[j] + pi * k[j];
        net[j] += df * f[j];
        d[j] = a[j] * df;
      }
      continue;
    }
    SIMD EACH(j, D) {
      d[j] += pi * k[j] - hi * du[j];
      net[j] += d[j] * f[j];
    }
    SIMD EACH(j, half) turned[j] += d[j + half] * f[j] - d[j] * f[j + half];
    turn_row(x, at, d, -1);
    SIMD EACH(j, D) d[j] *= a[j];
  }
  if (x->rotates) add(o->angle + at * half, 1, turned, half);
  REAL *to = o->log_a + at * x->decays;
  if (x->decays == 1) EACH(j, D) to[0] += net[j];
  else for (int64_t j = 0; j < D; j += x->decays) add(to, 1, net + j, x->decays);
}

static void backward_head(const Inputs *x, const Gradients *o, int64_t head, REAL *work) {
  int64_t T = x->T, H = x->H, G = x->G, D = x->D, R = x->R, C = x->C, K = (T + C - 1) / C, each = turn_elements(R);
  Back r;
  REAL **rows[] = {&r.a, &r.d, &r.e, &r.de, &r.du, &r.y, &r.z}, **small[] = {&r.h, &r.dq, &r.p};
  EACH(i, 7) *rows[i] = take(&work, D);
  EACH(i, 3) *small[i] = take(&work, R + 1);
  r.F = take(&work, (R + 1) * D);
  REAL *W = take(&work, (C + 1) * R * D); /* before each token of a span, and after the last */
  EACH(g, G) for (int64_t span = K - 1; span >= 0; span--) {
    int64_t start = span * C, c = least(C, T - start);
    memcpy(W, o->saved + ((head * G + g) * K + span) * R * D, R * D * sizeof(REAL));
    for (int64_t step = 0; step < 2 * c; step++) { /* forwards through the span, and back */
      int64_t t = step < c ? step : 2 * c - 1 - step, at = ((head / H) * T + start + t) * H + head % H, out = at * G + g;
      const REAL b = o->saved_b[out], root = (REAL)sqrt(b > 0 ? b : 0), *restrict u = o->saved_u + out * D;
      REAL *restrict w = r.F + R * D, *before = W + t * R * D;
      decays_of(x, at, r.a);
      drift(x, at, r.a, before, r.F);
      SIMD EACH(j, D) w[j] = root * u[j];
      if (step < c) shorten(R, D, 1, r.F, w, o->turns + out * each, before + R * D);
      else token_back(x, o, at, g, before + R * D, o->W + (head * G + g) * R * D, &r);
    }
  }
}

ENTRY(forward, Inputs, x, Outputs, y) {
  OVER_HEADS((x->R + 6) * (x->D + 16) + turn_elements(x->R) + choose_elements(x->R) + 64, forward_head(x, y, head, work))
}

ENTRY(backward, Inputs, x, Gradients, o) {
  OVER_HEADS(((x->C + 2) * x->R + 8) * (x->D + 16) + 3 * (x->R + 17), backward_head(x, o, head, work))
}
