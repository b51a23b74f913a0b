/* The gains of the diagonal covariance, token by token: the formulas and letters of design/diagonal.py, in C.
 *
 *     f = a2 p,   z = f + l2 N,                                                       u = z k
 *     f = a2 p,   z = (c2 re + s2 im, s2 re + c2 im) + l2 N,   w = c s (re - im),     u = z k + w (k of the other row)
 *     b = 1/(r2 + k'u),   p = z - b u^2
 *
 * with N = 1 - a2 for stationary noise; the second line for pairs of rows (re, im) of f that turn, w being the covariance inside a pair. A row that a sure
 * write resolves has p = d/(d/z + g^2) instead, see `look`. Rows of a rotation
 * come de-interleaved (real parts, then imaginary parts). Heads run in parallel. Forward keeps p of every token;
 * backward computes the rest anew.
 */
#include "frame.h"
#include "layout.h"
#include "positive.h"

#define INPUTS(X)                                                                   \
  X(INT, T) X(INT, H) X(INT, G) X(INT, D)                                           \
  X(INT, R)             /* decays of a token: 1 for all rows, D, or D/2 for pairs */ \
  X(INT, rotates)       /* whether drift turns pairs of rows */                     \
  X(READ, k)            /* [B,T,H,D] */                                             \
  X(READ, l2)           /* [B,T,H] */                                               \
  X(READ, r2)           /* [B,T,H,G] */                                             \
  X(READ, a2)           /* squared decays, [B,T,H,R] */                             \
  X(READ_OR_NULL, log_a) /* log decays, [B,T,H,R]; given for stationary noise */    \
  X(READ_OR_NULL, cos)  /* of each turn, [B,T,H,D/2] */                             \
  X(READ_OR_NULL, sin)                                                              \
  X(READ, rows)         /* diagonal of N, [D] */                                    \
  X(READ, start)        /* p before the first token, [B,H,G,D] */
STRUCT(Inputs, INPUTS)

#define OUTPUTS(X)                                                                  \
  X(WRITE, u) X(WRITE, b) X(WRITE, p) /* [B,T,H,G,D], [B,T,H,G], [B,T,H,G,D] */
STRUCT(Outputs, OUTPUTS)

#define GRADIENTS(X)                                                                \
  X(READ, saved_b) X(READ, saved_p)    /* b and p, as forward left them */          \
  X(READ, u) X(READ, b) X(READ, p)     /* gradients of the outputs */               \
  X(WRITE, k) X(WRITE, l2) X(WRITE, r2) X(WRITE, log_a) X(WRITE, start) /* of the inputs, zero at first */ \
  X(WRITE_OR_NULL, angle)              /* likewise, with a rotation */
STRUCT(Gradients, GRADIENTS)

/* Rows that the decays of a token cover: pairs need them twice. */
INLINE int64_t covered(const Inputs *x) { return x->R == 1 ? x->D : x->R; }

/* The part of l2 that enters each row. `room` has room for them. */
INLINE const REAL *entering(const Inputs *x, int64_t at, REAL *restrict room) {
  if (!x->log_a) return x->rows;
  const REAL *restrict log_a = x->log_a + at * x->R, *restrict a2 = x->a2 + at * x->R;
  SIMD EACH(i, x->R) room[i] = replaced(2 * log_a[i], a2[i]);
  for (int64_t i = x->R; i < x->D; i++) room[i] = room[i - x->R];
  return room;
}

/* f, z, w and u of the token `at`, from p before it. */
INLINE void predict(const Inputs *x, int64_t at, const REAL *p, const REAL *restrict N, REAL *restrict f, REAL *restrict z, REAL *restrict w,
                    REAL *restrict u) {
  int64_t D = x->D, half = D / 2, n = covered(x);
  const REAL *restrict k = x->k + at * D, l2 = x->l2[at];
  for (int64_t i = 0; i < D; i += n) scaled(f + i, x->a2 + at * x->R, p + i, x->R, n);
  if (!x->rotates) {
    SIMD EACH(i, D) {
      z[i] = f[i] + l2 * N[i];
      u[i] = z[i] * k[i];
    }
    return;
  }
  const REAL *restrict cos = x->cos + at * half, *restrict sin = x->sin + at * half;
  SIMD EACH(i, half) {
    int64_t j = i + half;
    REAL c2 = cos[i] * cos[i], s2 = sin[i] * sin[i];
    w[i] = cos[i] * sin[i] * (f[i] - f[j]);
    z[i] = c2 * f[i] + s2 * f[j] + l2 * N[i];
    z[j] = s2 * f[i] + c2 * f[j] + l2 * N[j];
    u[i] = z[i] * k[i] + w[i] * k[j];
    u[j] = z[j] * k[j] + w[i] * k[i];
  }
}

/* Whether a write leaves less than RESOLVED of the variance of any row. */
INLINE int resolves(const REAL *restrict z, const REAL *restrict u, REAL b, int64_t D) {
  int any = 0;
  _Pragma("omp simd reduction(| : any)") EACH(i, D) any |= z[i] - b * u[i] * u[i] < RESOLVED * z[i];
  return any;
}

/* Row i as if it were observed alone, with the key g and the noise d: d = r2 + what the others add to k'u. `other` is
 * the other row of its pair, or i; only that pair can have rows that are resolved, since b k'u < 1. */
typedef struct {
  int64_t other;
  REAL g, d;
} Alone;

static Alone look(const Inputs *x, int64_t at, int64_t i, const REAL *N, const REAL *f, const REAL *z, const REAL *w, const REAL *u,
                  REAL r2) {
  int64_t D = x->D;
  const REAL *k = x->k + at * D, l2 = x->l2[at];
  if (!x->rotates) {
    Alone a = {i, k[i], r2};
    EACH(n, D) a.d += n == i ? 0 : k[n] * u[n];
    return a;
  }
  int64_t half = D / 2, pair = i % half, j = i < half ? i + half : i - half;
  Alone a = {j, k[i] + w[pair] * k[j] / z[i], r2};
  EACH(n, half) {
    REAL both = k[n] * u[n] + k[n + half] * u[n + half];
    a.d += n == pair || both < 0 ? 0 : both;
  }
  /* (z_i z_j - w^2)/z_i, what row j has beyond its correlation with row i, as a sum of positive terms */
  REAL c2 = x->cos[at * half + pair] * x->cos[at * half + pair], s2 = x->sin[at * half + pair] * x->sin[at * half + pair];
  REAL turned_i = c2 * f[i] + s2 * f[j], turned_j = s2 * f[i] + c2 * f[j], noise_i = l2 * N[i], noise_j = l2 * N[j];
  a.d += k[j] * k[j] * ((f[i] * f[j] + noise_i * turned_j + noise_j * turned_i + noise_i * noise_j) / z[i]);
  return a;
}

static void forward_head(const Inputs *x, const Outputs *y, int64_t head, REAL *work) {
  int64_t T = x->T, H = x->H, G = x->G, D = x->D;
  REAL *f = work, *restrict z = f + D, *w = z + D, *room = w + D;
  EACH(g, G) {
    const REAL *p = x->start + (head * G + g) * D;
    EACH(t, T) {
      int64_t at = ((head / H) * T + t) * H + head % H, out = at * G + g;
      REAL *restrict u = y->u + out * D, *restrict next = y->p + out * D;
      const REAL *N = entering(x, at, room);
      predict(x, at, p, N, f, z, w, u);
      const REAL b = y->b[out] = 1 / (x->r2[out] + dot(x->k + at * D, u, D));
      SIMD EACH(i, D) next[i] = z[i] - b * u[i] * u[i];
      if (resolves(z, u, b, D)) EACH(i, D) {
        if (next[i] < RESOLVED * z[i]) {
          Alone a = look(x, at, i, N, f, z, w, u, x->r2[out]);
          next[i] = resolved(z[i], a.g, a.d);
        }
      }
      p = next;
    }
  }
}

/* The adjoint of a turn: d holds the gradient of z, and on return of f. */
INLINE void turn_back(const Inputs *x, int64_t at, const REAL *restrict f, const REAL *restrict w,
                      const REAL *restrict du, REAL *restrict d, REAL *restrict dk, REAL *restrict dangle) {
  int64_t half = x->D / 2;
  const REAL *restrict k = x->k + at * x->D, *restrict cos = x->cos + at * half, *restrict sin = x->sin + at * half;
  SIMD EACH(i, half) {
    int64_t j = i + half;
    REAL c2 = cos[i] * cos[i], s2 = sin[i] * sin[i], cs = cos[i] * sin[i], real = d[i], imaginary = d[j];
    REAL dw = du[i] * k[j] + du[j] * k[i];
    dk[i] += w[i] * du[j];
    dk[j] += w[i] * du[i];
    dangle[i] += (f[i] - f[j]) * (2 * cs * (imaginary - real) + (c2 - s2) * dw);
    d[i] = c2 * real + s2 * imaginary + cs * dw;
    d[j] = s2 * real + c2 * imaginary - cs * dw;
  }
}

/* What resolved rows of one token pass back: the gradient of d, which all rows outside the pair share, and of w. */
typedef struct {
  int64_t first, second; /* the rows of the pair; twice the same row without a rotation; -1 if none is resolved */
  REAL d, w, z[2], k[2];
} Resolved;

/* Takes the gradients of p of resolved rows out of dp, and passes them back through p = d/(d/z + g^2). */
static Resolved resolved_back(const Inputs *x, int64_t at, const REAL *N, const REAL *f, const REAL *z, const REAL *w, const REAL *u,
                              REAL b, REAL r2, REAL *dp) {
  int64_t D = x->D, half = D / 2;
  const REAL *k = x->k + at * D;
  Resolved o = {.first = -1, .second = -1};
  EACH(i, D) {
    if (!(z[i] - b * u[i] * u[i] < RESOLVED * z[i])) continue;
    Alone a = look(x, at, i, N, f, z, w, u, r2);
    int64_t j = a.other, own = i > j, other = !own;
    REAL all = a.d / z[i] + a.g * a.g, dd = dp[i] * (a.g / all) * (a.g / all), dg = -2 * dp[i] * (a.d / all) * (a.g / all);
    REAL part = a.d / (z[i] * all), dz = dp[i] * part * part;
    dp[i] = 0;
    o.first = least(i, j), o.second = i > j ? i : j;
    o.d += dd;
    o.k[own] += dg;
    o.z[own] += dz;
    if (!x->rotates) continue;
    REAL ratio = w[i % half] / z[i], kj = k[j]; /* g = k_i + w k_j/z_i, and d has k_j^2 (z_j - w^2/z_i) */
    o.w += dg * kj / z[i] - 2 * dd * kj * kj * ratio;
    o.z[own] += dd * kj * kj * ratio * ratio - dg * kj * ratio / z[i];
    o.z[other] += dd * kj * kj;
    o.k[other] += dg * ratio + 2 * dd * kj * (z[j] - ratio * w[i % half]);
  }
  return o;
}

/* Rows start … end-1 back through p = z - b u^2, s = r2 + k'u and u = z k: dp becomes the gradient of z. Returns that of l2. */
INLINE REAL rows_back(int64_t start, int64_t end, const REAL *restrict k, const REAL *restrict z,
                      const REAL *restrict u, const REAL *restrict from_u, REAL b, REAL ds, const REAL *restrict N,
                      REAL *restrict du, REAL *restrict dk, REAL *restrict dp) {
  REAL dl2 = 0;
  _Pragma("omp simd reduction(+ : dl2)") for (int64_t i = start; i < end; i++) {
    du[i] = from_u[i] - 2 * b * u[i] * dp[i] + ds * k[i];
    dk[i] += ds * u[i] + z[i] * du[i];
    dp[i] += du[i] * k[i];
    dl2 += N[i] * dp[i];
  }
  return dl2;
}

/* dp: gradient of p after all tokens, which is zero, and then of p before each of them. */
static void backward_head(const Inputs *x, const Gradients *o, int64_t head, REAL *work) {
  int64_t T = x->T, H = x->H, G = x->G, D = x->D, R = x->R, n = covered(x);
  REAL *f = work, *restrict z = f + D, *w = z + D, *restrict u = w + D, *restrict du = u + D, *room = du + D;
  EACH(g, G) {
    REAL *restrict dp = o->start + (head * G + g) * D;
    for (int64_t t = T - 1; t >= 0; t--) {
      int64_t at = ((head / H) * T + t) * H + head % H, out = at * G + g;
      const REAL *restrict k = x->k + at * D, *restrict own = o->p + out * D, *restrict from_u = o->u + out * D;
      const REAL *restrict N = entering(x, at, room), b = o->saved_b[out];
      REAL *restrict dk = o->k + at * D, db = o->b[out], dl2;
      predict(x, at, t ? o->saved_p + (out - H * G) * D : x->start + (head * G + g) * D, N, f, z, w, u);
      SIMD EACH(i, D) dp[i] += own[i];
      Resolved a = {.first = -1};
      if (resolves(z, u, b, D)) a = resolved_back(x, at, N, f, z, w, u, b, x->r2[out], dp);
      _Pragma("omp simd reduction(+ : db)") EACH(i, D) db -= u[i] * u[i] * dp[i];
      const REAL ds = o->r2[out] = -b * b * db; /* s = r2 + k'u = 1/b */
#define ROWS(start, end, share) rows_back(start, end, k, z, u, from_u, b, share, N, du, dk, dp)
      if (a.first < 0) {
        dl2 = ROWS(0, D, ds);
      } else { /* d is s without the pair */
        o->r2[out] += a.d;
        dl2 = ROWS(0, a.first, ds + a.d) + ROWS(a.first, a.first + 1, ds);
        if (x->rotates) dl2 += ROWS(a.first + 1, a.second, ds + a.d) + ROWS(a.second, a.second + 1, ds);
        dl2 += ROWS(a.second + 1, D, ds + a.d);
        dk[a.first] += a.k[0], dp[a.first] += a.z[0], dl2 += N[a.first] * a.z[0];
        if (x->rotates) dk[a.second] += a.k[1], dp[a.second] += a.z[1], dl2 += N[a.second] * a.z[1];
      }
#undef ROWS
      o->l2[at] += dl2;
      if (x->rotates) turn_back(x, at, f, w, du, dp, dk, o->angle + at * (D / 2));
      if (x->rotates && a.first >= 0) {
        REAL c = x->cos[at * (D / 2) + a.first], s = x->sin[at * (D / 2) + a.first];
        o->angle[at * (D / 2) + a.first] += (f[a.first] - f[a.second]) * (c * c - s * s) * a.w;
        dp[a.first] += c * s * a.w;
        dp[a.second] -= c * s * a.w;
      }
      if (x->log_a) EACH(i, D) f[i] -= x->l2[at] * x->a2[at * R + i % R]; /* a larger decay keeps noise out */
      for (int64_t i = 0; i < D; i += n) {
        gather(o->log_a + at * R, 2, f + i, dp + i, R, n);
        scaled(dp + i, x->a2 + at * R, dp + i, R, n);
      }
    }
  }
}

ENTRY(forward, Inputs, x, Outputs, y) {
  OVER_HEADS(4 * x->D, forward_head(x, y, head, work))
}

ENTRY(backward, Inputs, x, Gradients, o) {
  OVER_HEADS(6 * x->D, backward_head(x, o, head, work))
}
