/* One decoding step of any design: every head of a batch drifts, is written to and read, and is looked at on the way.
 *
 *     w = A'k,   e = v - M'w                            what memory predicts at the key; e = v where it is not observed
 *     u = A P w + l2 N k,    b = 1/(r2 + k'u)           Dense, Diagonal and Block
 *     u = s A P w + lambda (k - s A w)                  PartialReset, whose s is gamma, and Discounted: s = 1/delta
 *     u = lambda k,          b = 1/(r2 + lambda k'k)    Reset and PerColumnReset
 *     u = lambda k,          b = 1/(r2 + lambda)        LatentInput, whose P first gains lambda k k'
 *     M = A M + b u e',      P = A P A' + l2 N - b u u',      o = M'q
 *
 * (P with s and lambda where u has them; of a Block only what lies inside a block.)
 * A is diagonal or turns pairs of rows; for LatentInput and the resets without P it may also remove what memory holds at
 * one key, A = diag(a) - b_A kappa', and then A'k and A M lose kappa (b_A'k) and b_A (kappa'M).
 *
 * M and P are read along the key, then read again and written elsewhere. `step` returns how many heads have a flaw: a
 * parameter out of bounds, a b that is no precision, an o or P that is not finite, a P that a sure write has left
 * indefinite. Nothing else needs to be looked at:
 * whatever is not finite in q, k, v, M or P makes one of these so, since 0 times infinity is not a number. What it
 * is, the caller finds out. Pairs of rows that turn are neighbours.
 */
#include <float.h>
#include <tgmath.h>

#include "blocks.h"
#include "layout.h"
#include "positive.h"
#include "step_covariance.h"

#define LARGEST (sizeof(REAL) == sizeof(float) ? (REAL)FLT_MAX : (REAL)DBL_MAX)
#define RULES(X) X(KALMAN) X(DELTA) X(ADDITIVE)
CASES(Rule, RULES)

#define SIZES(X)                                                                   \
  X(INT, D) X(INT, M)                                                              \
  X(INT, N)         /* gains of a write: noise groups, or columns */               \
  X(INT, rule)      /* of `enum Rule` */                                           \
  X(INT, diagonal)  /* whether P is its diagonal */                                \
  X(INT, rows)      /* of a block of P; D of them in one that is whole */          \
  X(INT, rotates)   /* whether drift turns pairs of rows */                        \
  X(INT, every)     /* process noise enters every row, or every second one */      \
  X(INT, stationary) /* whether l2 (I - A A') enters instead */                    \
  X(INT, l2_head) X(INT, l2_entry) X(INT, r2_head) X(INT, r2_entry)                \
  X(INT, lambda_head) X(INT, lambda_entry) /* strides of the parameters */         \
  X(INT, gamma_head) X(INT, gamma_entry) X(INT, log_delta_head) X(INT, log_delta_entry) \
  X(INT, log_a_head) X(INT, log_a_entry) X(INT, angle_head) X(INT, angle_entry)    \
  X(INT, removal_key_head) X(INT, removal_key_entry) X(INT, removal_head) X(INT, removal_entry) \
  X(DOUBLE, bound)  /* the largest b r2, rounded: 1/b is at least r2 */
STRUCT(Sizes, SIZES)

#define TENSORS(X)                                                                 \
  X(READ, q) X(READ, k) X(READ, v)     /* [B,H,D], [B,H,D], [B,H,M] */             \
  X(READ, from_M)                      /* [B,H,D,M] */                             \
  X(READ_OR_NULL, from_P)              /* [B,H,N,D,D], [B,H,N,D/rows,rows,rows] or [B,H,N,D] */ \
  X(READ_OR_NULL, l2) X(READ_OR_NULL, r2) X(READ_OR_NULL, lambda) /* what the design has of parameters */ \
  X(READ_OR_NULL, log_a) X(READ_OR_NULL, angle)                                    \
  X(READ_OR_NULL, removal_key) X(READ_OR_NULL, removal) /* kappa and b_A */        \
  X(READ_OR_NULL, gamma) X(READ_OR_NULL, log_delta) /* how P forgets */            \
  X(WRITE, M) X(WRITE_OR_NULL, P)      /* the new belief */                        \
  X(WRITE, o)                          /* what is read from it, [B,H,M] */         \
  X(WRITE_OR_NULL, squares)            /* b e'e of Dense, Diagonal and Block, [B,H,N] */
STRUCT(Tensors, TENSORS)

/* A x, or A'x with sign = -1; c and s are the decays and NULL, or rho cos and rho sin of each pair. */
INLINE void drift(REAL *restrict to, const REAL *restrict x, const REAL *restrict c, const REAL *restrict s, REAL sign,
                  int64_t D) {
  if (!s) {
    SIMD EACH(i, D) to[i] = c[i] * x[i];
    return;
  }
  EACH(i, D / 2) {
    REAL real = x[2 * i], imaginary = x[2 * i + 1], turn = sign * s[i];
    to[2 * i] = c[i] * real - turn * imaginary;
    to[2 * i + 1] = turn * real + c[i] * imaginary;
  }
}

#define PAIR 2 /* vectors of columns that are kept in registers while all rows pass, for each of four sums */
#define FOUR 4 /* the same for a mean beyond the first-level cache, where longer pieces of a row arrive sooner */
#define BEYOND_L1(D, n) ((D) * (n) * (int64_t)sizeof(REAL) > 1 << 16)
#define COLUMNS(h) _Pragma("GCC unroll 4") for (int64_t h = 0; h < W; h++)

/* y = X'w for W vectors of columns of D rows, which lie `stride` apart. */
INLINE void look_vectors(int W, REAL *restrict y, const REAL *restrict w, const REAL *restrict X, int64_t stride, int64_t D) {
  vec s[4][FOUR] = {{{0}}};
  int64_t i = 0;
  for (; i + 4 <= D; i += 4) _Pragma("GCC unroll 4") EACH(r, 4)
    COLUMNS(h) s[r][h] += w[i + r] * *(const vec *)(X + (i + r) * stride + h * LANES);
  for (; i < D; i++) COLUMNS(h) s[0][h] += w[i] * *(const vec *)(X + i * stride + h * LANES);
  COLUMNS(h) *(vec *)(y + h * LANES) = (s[0][h] + s[1][h]) + (s[2][h] + s[3][h]);
}

/* y = X'w for D rows of n, which lie `stride` apart. */
INLINE void look(REAL *restrict y, const REAL *restrict w, const REAL *restrict X, int64_t stride, int64_t D,
                 int64_t n) {
  int64_t j = 0;
  if (BEYOND_L1(D, n)) for (; j + FOUR * LANES <= n; j += FOUR * LANES) look_vectors(FOUR, y + j, w, X + j, stride, D);
  for (; j + PAIR * LANES <= n; j += PAIR * LANES) look_vectors(PAIR, y + j, w, X + j, stride, D);
  for (; j + LANES <= n; j += LANES) look_vectors(1, y + j, w, X + j, stride, D);
  if (j == n) return;
  memset(y + j, 0, (n - j) * sizeof(REAL));
  EACH(i, D) add(y + j, w[i], X + i * stride + j, n - j);
}

/* to = A M + x y' and o = to'q without rotation, for W vectors of columns. */
INLINE void write_vectors(int W, REAL *restrict to, const REAL *restrict M, int64_t stride, const REAL *restrict c,
                          const REAL *restrict x, const REAL *restrict y, const REAL *restrict q, REAL *restrict o,
                          int64_t D) {
  vec s[4][FOUR] = {{{0}}}, v[FOUR];
  COLUMNS(h) v[h] = *(const vec *)(y + h * LANES);
#define WRITE_ROW(i, r)                                                                              \
  COLUMNS(h) {                                                                                       \
    const vec z = c[i] * *(const vec *)(M + (i) * stride + h * LANES) + x[i] * v[h];                 \
    *(vec *)(to + (i) * stride + h * LANES) = z;                                                     \
    s[r][h] += q[i] * z;                                                                             \
  }
  int64_t i = 0;
  for (; i + 4 <= D; i += 4) _Pragma("GCC unroll 4") EACH(r, 4) WRITE_ROW(i + r, r)
  for (; i < D; i++) WRITE_ROW(i, 0)
#undef WRITE_ROW
  COLUMNS(h) *(vec *)(o + h * LANES) = (s[0][h] + s[1][h]) + (s[2][h] + s[3][h]);
}

/* to = A M + x y' and o = to'q, for n columns of a mean whose rows lie `stride` apart. */
INLINE void write_M(REAL *restrict to, const REAL *restrict M, int64_t stride, const REAL *restrict c,
                    const REAL *restrict s, const REAL *restrict x, const REAL *restrict y, const REAL *restrict q,
                    REAL *restrict o, int64_t D, int64_t n) {
  int64_t j = 0;
  if (!s) {
    if (BEYOND_L1(D, n))
      for (; j + FOUR * LANES <= n; j += FOUR * LANES) write_vectors(FOUR, to + j, M + j, stride, c, x, y + j, q, o + j, D);
    for (; j + PAIR * LANES <= n; j += PAIR * LANES) write_vectors(PAIR, to + j, M + j, stride, c, x, y + j, q, o + j, D);
    for (; j + LANES <= n; j += LANES) write_vectors(1, to + j, M + j, stride, c, x, y + j, q, o + j, D);
  }
  if (j == n) return;
  to += j, M += j, y += j, o += j, n -= j;
  memset(o, 0, n * sizeof(REAL));
  for (int64_t i = 0; s && i + 2 <= D; i += 2) {
    const REAL *restrict m0 = M + i * stride, *restrict m1 = m0 + stride;
    REAL *restrict t0 = to + i * stride, *restrict t1 = t0 + stride;
    const REAL x0 = x[i], x1 = x[i + 1], q0 = q[i], q1 = q[i + 1], cos = c[i / 2], sin = s[i / 2];
    SIMD EACH(l, n) {
      REAL z0 = (cos * m0[l] - sin * m1[l]) + x0 * y[l], z1 = (sin * m0[l] + cos * m1[l]) + x1 * y[l];
      t0[l] = z0, t1[l] = z1;
      o[l] += q0 * z0 + q1 * z1;
    }
  }
  EACH(i, s ? 0 : D) {
    SIMD EACH(l, n) {
      REAL z = c[i] * M[i * stride + l] + x[i] * y[l];
      to[i * stride + l] = z;
      o[l] += q[i] * z;
    }
  }
}

/* to -= b y' and o = to'q: what a removal takes from n columns of a mean, whose rows lie `stride` apart. */
INLINE void remove_M(REAL *restrict to, int64_t stride, const REAL *restrict b, const REAL *restrict y,
                     const REAL *restrict q, REAL *restrict o, int64_t D, int64_t n) {
  memset(o, 0, n * sizeof(REAL));
  EACH(i, D) {
    SIMD EACH(j, n) {
      REAL z = to[i * stride + j] - b[i] * y[j];
      to[i * stride + j] = z;
      o[j] += q[i] * z;
    }
  }
}

INLINE int is_variance(REAL x) { return x >= 0 && x <= LARGEST; }

/* Whether b is the inverse of a variance of at least r2, up to rounding. */
INLINE int is_precision(const Sizes *z, REAL b, REAL r2) { return b > 0 && b <= LARGEST && b * r2 <= (REAL)z->bound; }

/* l2 (1 - a^2) for each row, which two rows share where pairs turn. */
static void stationary_noise(const Sizes *z, const Tensors *x, int64_t h, REAL *l2, REAL variance, int64_t D) {
  EACH(i, D) {
    const int64_t from = z->rotates ? i / 2 : i;
    REAL log_a = x->log_a ? x->log_a[h * z->log_a_head + from * z->log_a_entry] : 0;
    l2[i] = i && !z->log_a_entry ? l2[0] : -variance * expm1(2 * log_a);
  }
}

/* The decay of each row, or rho cos and rho sin of each pair, and the process noise of each row, if the design has it;
 * 0 if a parameter is out of bounds. */
INLINE int drifts(const Sizes *z, const Tensors *x, int64_t h, REAL *c, REAL *s, REAL *l2, int64_t D) {
  int good = 1;
  const int64_t decays = z->rotates ? D / 2 : D;
  EACH(i, decays) {
    REAL log_a = x->log_a ? x->log_a[h * z->log_a_head + i * z->log_a_entry] : 0;
    good &= log_a <= 0 && log_a >= -LARGEST;
    c[i] = i && !z->log_a_entry ? c[0] : exp(log_a);
  }
  if (x->l2) {
    const REAL variance = x->l2[h * z->l2_head];
    good &= is_variance(variance);
    if (z->stationary) {
      stationary_noise(z, x, h, l2, variance, D);
    } else {
      if (z->every > 1) memset(l2, 0, D * sizeof(REAL));
      for (int64_t i = 0; i < D; i += z->every) l2[i] = variance;
    }
  }
  if (z->rotates) EACH(i, D / 2) {
    REAL angle = x->angle[h * z->angle_head + i * z->angle_entry], rho = c[i];
    good &= fabs(angle) <= LARGEST;
    c[i] = rho * cos(angle);
    s[i] = rho * sin(angle);
  }
  return good;
}

/* How P forgets: the square root of s; A of P is that times c and s of the mean. lambda (I - s A A') enters as noise. */
INLINE int forgets(const Sizes *z, const Tensors *x, int64_t h, REAL *root, REAL *l2, int64_t D) {
  if (x->log_delta) {
    const REAL log_delta = x->log_delta[h * z->log_delta_head];
    *root = exp(-log_delta / 2);
    memset(l2, 0, D * sizeof(REAL));
    return log_delta <= 0 && *root <= LARGEST;
  }
  const REAL gamma = x->gamma[h * z->gamma_head], lambda = x->lambda[h * z->lambda_head];
  *root = sqrt(gamma);
  stationary_noise(z, x, h, l2, lambda, D);
  SIMD EACH(i, D) l2[i] = (1 - gamma) * lambda + gamma * l2[i];
  return gamma >= 0 && gamma <= 1 && is_variance(lambda) && lambda > 0;
}

/* The entries of kappa and b_A, each its own or one number for all. */
INLINE void removal_of(const Sizes *z, const Tensors *x, int64_t h, REAL *kappa, REAL *b, int64_t D) {
  EACH(i, D) {
    kappa[i] = x->removal_key[h * z->removal_key_head + i * z->removal_key_entry];
    b[i] = x->removal[h * z->removal_head + i * z->removal_entry];
  }
}

/* What a write leaves of P, which has blocks: A P A' + l2 N - b u u' inside each, from A = c, s. Whether it is sound. */
INLINE int write_blocks(const Sizes *z, REAL *to, const REAL *P, const REAL *c, const REAL *s, const REAL *u, REAL b,
                        const REAL *l2, REAL r2) {
  const int64_t n = z->rows;
  int good = 1;
  for (int64_t start = 0; start < z->D; start += n, P += n * n, to += n * n) {
    REAL sum = s ? turn_P(to, P, c + start / 2, s + start / 2, u + start, b, n)
                 : write_P(to, P, c + start, u + start, b, n);
    for (int64_t i = 0; i < n; i += z->every) sum += to[i * n + i] += l2[start + i];
    good &= isfinite(sum) && (b * r2 >= (REAL)0.5 || !shrinks(to, u + start, b, n) || !lost(to, n));
  }
  return good;
}

/* Dense, Diagonal and Block: every noise group has a covariance, hence a gain, of its own. */
static int kalman(const Sizes *z, const Tensors *x, int64_t h, const REAL *c, const REAL *s, REAL *l2, const REAL *w,
                  REAL *u, REAL *y, REAL *work) {
  const int64_t D = z->D, M = z->M, m = M / z->N, rows = z->rows;
  const REAL *k = x->k + h * D, *v = x->v + h * M, *q = x->q + h * D, *Pc = c, *Ps = s;
  int64_t entries = z->diagonal ? D : D * rows;
  int good = 1;
  REAL root = 1;
  if (x->gamma || x->log_delta) {
    good &= forgets(z, x, h, &root, l2, D);
    REAL *faded = work, *turned = work + D;
    SIMD EACH(i, s ? D / 2 : D) faded[i] = root * c[i];
    if (s) SIMD EACH(i, D / 2) turned[i] = root * s[i];
    Pc = faded, Ps = s ? turned : NULL;
  }
  EACH(g, z->N) {
    const REAL *P = x->from_P + (h * z->N + g) * entries, *from = x->from_M + h * D * M + g * m;
    REAL *to = x->P + (h * z->N + g) * entries, r2 = x->r2[h * z->r2_head + g * z->r2_entry];
    if (z->diagonal) {
      SIMD EACH(i, D) y[i] = P[i] * w[i];
    } else {
      for (int64_t i = 0; i < D; i += rows) look(y + i, w + i, P + i * rows, rows, rows, rows);
    }
    drift(u, y, c, s, 1, D);
    if (root != 1) SIMD EACH(i, D) u[i] *= root * root;
    for (int64_t i = 0; i < D; i += z->every) u[i] += l2[i] * k[i];
    REAL b = 1 / (r2 + dot(k, u, D));
    good &= is_variance(r2) && r2 > 0 && is_precision(z, b, r2);
    if (z->diagonal) good &= isfinite(write_diagonal(to, P, c, s, k, u, b, l2, z->every, r2, D));
    else good &= write_blocks(z, to, P, Pc, Ps, u, b, l2, r2);
    look(y, w, from, M, D, m);
    SIMD EACH(j, m) y[j] = v[g * m + j] - y[j];
    if (x->squares) x->squares[h * z->N + g] = b * dot(y, y, m);
    SIMD EACH(j, m) y[j] *= b;
    write_M(x->M + h * D * M + g * m, from, M, c, s, u, y, q, x->o + h * M + g * m, D, m);
  }
  return good;
}

/* Reset, PerColumnReset and LatentInput: a write lands along its key, with a gain for each group of columns. */
static int along_key(const Sizes *z, const Tensors *x, int64_t h, const REAL *c, const REAL *s, REAL *w, REAL *u,
                     REAL *y, REAL *work) {
  const int64_t D = z->D, M = z->M, m = M / z->N;
  const REAL *k = x->k + h * D, *v = x->v + h * M, *from = x->from_M + h * D * M;
  int additive = z->rule == ADDITIVE, good = 1;
  REAL length = additive ? 1 : dot(k, k, D), added = 0;
  REAL *kappa = u, *b_A = work, *removed = work + D;
  if (x->removal) {
    removal_of(z, x, h, kappa, b_A, D);
    const REAL along = dot(b_A, k, D);
    SIMD EACH(i, D) w[i] -= kappa[i] * along;
    look(removed, kappa, from, M, D, M);
  }
  if (additive) {
    memset(y, 0, M * sizeof(REAL));
  } else {
    look(y, w, from, M, D, M);
  }
  EACH(n, z->N) {
    REAL r2 = x->r2[h * z->r2_head + n * z->r2_entry], lambda = x->lambda[h * z->lambda_head + n * z->lambda_entry];
    REAL b = 1 / (r2 + lambda * length);
    good &= is_variance(r2) && is_variance(lambda) && lambda > 0 && (r2 > 0 || additive) && is_precision(z, b, r2);
    SIMD EACH(j, m) y[n * m + j] = (b * lambda) * (v[n * m + j] - y[n * m + j]);
    added = b * lambda * r2; /* lambda - b lambda^2 */
  }
  write_M(x->M + h * D * M, from, M, c, s, k, y, x->q + h * D, x->o + h * M, D, M);
  if (x->removal) remove_M(x->M + h * D * M, M, b_A, removed, x->q + h * D, x->o + h * M, D, M);
  if (x->P) { /* LatentInput with Dense */
    const REAL *P = x->from_P + h * D * D;
    REAL *to = x->P + h * D * D;
    good &= isfinite(s ? turn_P(to, P, c, s, k, -added, D) : write_P(to, P, c, k, -added, D));
  }
  return good;
}

static int64_t step_head(const Sizes *z, const Tensors *x, int64_t h, REAL *work) {
  const int64_t D = z->D, M = z->M;
  REAL *l2 = work, *c = l2 + D, *s = c + D, *w = s + D, *u = w + D, *y = u + D, *more = y + (D > M ? D : M);
  int good = drifts(z, x, h, c, s, l2, D);
  if (!z->rotates) s = NULL;
  drift(w, x->k + h * D, c, s, -1, D);
  good &= z->rule == KALMAN ? kalman(z, x, h, c, s, l2, w, u, y, more) : along_key(z, x, h, c, s, w, u, y, more);
  REAL sum = 0;
  EACH(j, M) sum += x->o[h * M + j];
  return !(good && isfinite(sum));
}

/* Returns how many heads have a flaw, or -1 times the bytes that a thread could not allocate. */
ENTRY(step, Sizes, z, Tensors, x) {
  int64_t flawed = 0, missing = 0;
  (void)threads; /* unused where the compiler has no OpenMP */
#pragma omp parallel num_threads(threads) reduction(+ : flawed) reduction(max : missing)
  {
    REAL *work = room(7 * z->D + 2 * z->M, &missing);
#pragma omp for schedule(static)
    EACH(h, heads) if (work) flawed += step_head(z, x, h, work);
    free(work);
  }
  return missing ? -missing : flawed;
}
