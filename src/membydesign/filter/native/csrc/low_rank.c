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

/* How R + 1 rows became R, as one piece of memory: row, total, then q [n] and the factor [n,n]. */
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

/* F = W A'. */
static void drift(const Inputs *x, int64_t at, const REAL *restrict a, const REAL *W, REAL *F) {
  int64_t D = x->D;
  EACH(i, x->R) {
    REAL *restrict to = F + i * D;
    const REAL *restrict from = W + i * D;
    SIMD EACH(j, D) to[j] = a[j] * from[j];
    if (x->rotates) turn_row(x, at, to, 1);
  }
}

/* Decide how the n rows F become one less; `room` has (3 n + 4) ld numbers. Room for 3 rows follows F. */
static void choose(int64_t n, int64_t D, const REAL *F, REAL *turn, REAL *room) {
  int64_t ld = padded(n), R = n - 1;
  REAL *gram = room, *factor = gram + (n + 3) * ld, *inverse = factor + n * ld, *column = turn + Q + n, total = 0;
  EACH(i, n) gram[i * ld + i] = dot(F + i * D, F + i * D, D);
  EACH(i, R) if (gram[i * ld + i] == 0) {
    turn[ROW] = -2 - i;
    return;
  }
  if (gram[R * ld + R] == 0) {
    turn[ROW] = KEPT;
    return;
  }
  EACH(i, n) total += gram[i * ld + i];
  const REAL scale = 1 / total, rounding = 4 * n * EPSILON;
  rows_gram(n, D, F, gram, ld);
  EACH(i, n) {
    REAL *row = gram + i * ld;
    memset(row, 0, i * sizeof(REAL));
    memset(row + n, 0, (ld - n) * sizeof(REAL));
    EACH(j, n) row[j] *= scale;
  }
  memcpy(factor, gram, n * ld * sizeof(REAL));
  EACH(i, n) factor[i * ld + i] += rounding;
  small_cholesky(factor, n, ld);
  const int64_t row = largest_of_inverse(factor, n, ld, inverse);
  REAL *x = inverse, *q = turn + Q, squares = 1;
  EACH(j, n) x[j] = j == row ? 0 : j < row ? gram[j * ld + row] : gram[row * ld + j];
  memcpy(factor, gram, n * ld * sizeof(REAL));
  EACH(j, n) {
    factor[j * ld + j] += rounding;
    if (j < row) factor[j * ld + row] = 0;
    else factor[row * ld + j] = j == row;
  }
  small_cholesky(factor, n, ld);
  small_solve(factor, n, ld, x);
  EACH(j, n) squares += x[j] * x[j];
  const REAL length = 1 / (REAL)sqrt(squares);
  EACH(j, n) q[j] = (j == row ? 1 : -x[j]) * length;
  if (q[R] > 0) EACH(j, n) q[j] = -q[j];
  turn[ROW] = row, turn[TOTAL] = total;
  EACH(i, n) memcpy(column + i * n, factor + i * ld, n * sizeof(REAL));
}

/* W from F and w = F_R; `d` and `e` have D numbers. */
static void shorten(int64_t R, int64_t D, const REAL *F, const REAL *turn, REAL *W, REAL *restrict d, REAL *restrict e) {
  const REAL *restrict w = F + R * D, *q = turn + Q;
  int64_t row = (int64_t)turn[ROW];
  if (row < 0) {
    if (W != F) memcpy(W, F, R * D * sizeof(REAL));
    if (row != KEPT) memcpy(W + (-2 - row) * D, w, D * sizeof(REAL));
    return;
  }
  const REAL scale = 1 / (1 - q[R]);
  memset(d, 0, D * sizeof(REAL));
  rows_sum(R + 1, D, q, F, d);
  SIMD EACH(j, D) e[j] = (w[j] - d[j]) * scale;
  EACH(i, R) {
    REAL *to = W + i * D;
    const REAL *from = F + i * D, qi = q[i];
    SIMD EACH(j, D) to[j] = from[j] + qi * e[j];
  }
}

static int64_t turn_elements(int64_t R) { return Q + (R + 1) * (R + 2); }
static int64_t choose_elements(int64_t R) { return (3 * (R + 1) + 4) * padded(R + 1); }

static void forward_head(const Inputs *x, const Outputs *y, int64_t head, REAL *work) {
  int64_t T = x->T, H = x->H, G = x->G, D = x->D, R = x->R, C = x->C, K = (T + C - 1) / C, each = turn_elements(R);
  REAL *a = take(&work, D), *d = take(&work, D), *e = take(&work, D), *h = take(&work, R + 1);
  REAL *F = take(&work, (R + 4) * D), *own = take(&work, each), *room = work;
  memset(F, 0, (R + 4) * D * sizeof(REAL));
  EACH(g, G) {
    REAL *W = y->W + (head * G + g) * R * D;
    EACH(t, T) {
      int64_t at = ((head / H) * T + t) * H + head % H, out = at * G + g;
      const REAL *k = x->k + at * D;
      REAL *restrict u = y->u + out * D, *restrict w = F + R * D, *turn = y->turns ? y->turns + out * each : own;
      if (y->saved && t % C == 0)
        memcpy(y->saved + ((head * G + g) * K + t / C) * R * D, W, R * D * sizeof(REAL));
      decays_of(x, at, a);
      drift(x, at, a, W, F);
      rows_times(R, D, F, k, h);
      EACH(i, R) h[i] = -h[i];
      memcpy(u, k, D * sizeof(REAL));
      rows_sum(R, D, h, F, u);
      const REAL b = y->b[out] = 1 / (x->r2[out] + dot(k, u, D)), root = (REAL)sqrt(b > 0 ? b : 0);
      SIMD EACH(j, D) w[j] = root * u[j];
      choose(R + 1, D, F, turn, room);
      shorten(R, D, F, turn, W, d, e);
      if (y->variance) {
        const REAL *q = x->x + at * D;
        rows_times(R, D, W, q, h);
        REAL variance = dot(q, q, D) - dot(h, h, R);
        y->variance[out] = variance > 0 ? variance : 0;
      }
    }
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
  small_solve(factor, n, n, p);
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
      if (step < c) shorten(R, D, r.F, o->turns + out * each, before + R * D, r.d, r.e);
      else token_back(x, o, at, g, before + R * D, o->W + (head * G + g) * R * D, &r);
    }
  }
}

ENTRY(forward, Inputs, x, Outputs, y) {
  OVER_HEADS((x->R + 8) * (x->D + 16) + turn_elements(x->R) + choose_elements(x->R) + 64, forward_head(x, y, head, work))
}

ENTRY(backward, Inputs, x, Gradients, o) {
  OVER_HEADS(((x->C + 2) * x->R + 8) * (x->D + 16) + 3 * (x->R + 17), backward_head(x, o, head, work))
}
