/* The gains of a block-diagonal covariance, token by token: the formulas and letters of design/block.py, in C.
 *
 *     Z = A P A' + noise,  u = Z k,   b = 1/(r2 + k'u),   P = Z - b u u',   variance = q'P q
 *
 * for every block of n rows; b alone connects them. The rows of a pair that turns come de-interleaved inside each block
 * (real parts, then imaginary parts). Heads run in parallel. P is never formed between two tokens: with w = sqrt(b) u,
 * the next Z is made from Z - ww' in one go. Forward saves P before every C tokens; backward computes the Z between anew.
 */
#include "frame.h"
#include "layout.h"

#define INPUTS(X)                                                                   \
  X(INT, T) X(INT, H) X(INT, G) X(INT, D)                                           \
  X(INT, n)             /* rows of a block */                                       \
  X(INT, R)             /* decays of a token: 1 for all rows, D, or D/2 for pairs */ \
  X(INT, rotates)       /* whether drift turns pairs of rows */                     \
  X(INT, stationary)    /* whether noise is l2 (I - A A'), which replaces what the decay takes */ \
  X(INT, C)             /* tokens between two covariances that are saved */         \
  X(READ, k)            /* [B,T,H,D] */                                             \
  X(READ_OR_NULL, q)    /* [B,T,H,D] */                                             \
  X(READ, l2)           /* [B,T,H] */                                               \
  X(READ, r2)           /* [B,T,H,G] */                                             \
  X(READ, a)            /* decays, [B,T,H,R] */                                     \
  X(READ_OR_NULL, cos)  /* of each turn, [B,T,H,D/2] */                             \
  X(READ_OR_NULL, sin)                                                              \
  X(READ, rows)         /* diagonal of N, [D] */
STRUCT(Inputs, INPUTS)

#define OUTPUTS(X)                                                                  \
  X(WRITE, u) X(WRITE, b)   /* [B,T,H,G,D], [B,T,H,G] */                            \
  X(WRITE_OR_NULL, variance) /* [B,T,H,G] */                                        \
  X(WRITE, P)               /* in: before the first token, out: after the last; [B,H,G,D/n,n,n] */ \
  X(WRITE_OR_NULL, saved)   /* P before tokens 0, C, …: [B,H,G,K,D n] */
STRUCT(Outputs, OUTPUTS)

#define GRADIENTS(X)                                                                \
  X(READ, saved_u) X(READ, saved_b) X(READ, saved) /* as forward left them */       \
  X(READ, u) X(READ, b) X(READ_OR_NULL, variance)  /* gradients of the outputs */   \
  X(WRITE, P)                                      /* in: gradient of P at the end, out: at the start */ \
  X(WRITE, k) X(WRITE, l2) X(WRITE, r2) X(WRITE, log_a) /* of the inputs, zero at first */ \
  X(WRITE_OR_NULL, q) X(WRITE_OR_NULL, angle)           /* likewise, if there are such inputs */
STRUCT(Gradients, GRADIENTS)

/* The decays of all rows at the token `at`, and the noise that enters them. */
INLINE void drift_of(const Inputs *x, int64_t at, REAL *restrict a, REAL *restrict noise) {
  const REAL *restrict from = x->a + at * x->R, *restrict N = x->rows, l2 = x->l2[at];
  int64_t D = x->D, n = x->n, half = n / 2;
  if (x->R == 1) {
    EACH(i, D) a[i] = from[0];
  } else if (x->R == D) {
    memcpy(a, from, D * sizeof(REAL));
  } else {
    for (int64_t start = 0; start < D; start += n) {
      memcpy(a + start, from + start / 2, half * sizeof(REAL));
      memcpy(a + start + half, from + start / 2, half * sizeof(REAL));
    }
  }
  if (x->stationary) {
    SIMD EACH(i, D) noise[i] = l2 * ((1 - a[i]) * (1 + a[i]));
  } else {
    SIMD EACH(i, D) noise[i] = l2 * N[i];
  }
}

/* Rows and columns of a block turned, forwards (sign 1) or backwards (-1). */
static void turn_block(REAL *Z, int64_t n, const REAL *restrict cos, const REAL *restrict sin, REAL sign) {
  int64_t half = n / 2;
  EACH(i, half) {
    REAL *restrict x = Z + i * n, *restrict y = Z + (i + half) * n, c = cos[i], s = sign * sin[i];
    SIMD EACH(j, n) {
      REAL real = x[j], imaginary = y[j];
      x[j] = c * real - s * imaginary;
      y[j] = s * real + c * imaginary;
    }
  }
  EACH(i, n) {
    REAL *restrict x = Z + i * n, *restrict y = x + half;
    SIMD EACH(j, half) {
      REAL real = x[j], imaginary = y[j], s = sign * sin[j];
      x[j] = cos[j] * real - s * imaginary;
      y[j] = s * real + cos[j] * imaginary;
    }
  }
}

/* A block is walked in strips of columns whose sums over rows stay in registers: two vectors, one, or what is left. */
#define STRIPS(n, call)                                                        \
  int64_t j = 0;                                                               \
  for (; j + 2 * LANES <= (n); j += 2 * LANES) call(2);                        \
  for (; j + LANES <= (n); j += LANES) call(1);                                \
  if (j < (n)) call(0);
#define LOAD(to, from) _Pragma("GCC unroll 2") EACH(h, V) to[h] = *(const vec *)((from) + h * LANES);
#define KEEP(to, from) _Pragma("GCC unroll 2") EACH(h, V) *(vec *)((to) + h * LANES) = from[h];

/* Columns j, … of to = a (from - ww') a, and u += to k. */
INLINE void fade_columns(int V, int64_t n, int64_t j, const REAL *from, REAL *to, const REAL *restrict w,
                         const REAL *restrict a, const REAL *restrict k, REAL *restrict u) {
  if (!V) {
    EACH(i, n) for (int64_t l = j; l < n; l++) {
      const REAL z = (from[i * n + l] - w[i] * w[l]) * (a[i] * a[l]);
      to[i * n + l] = z;
      u[l] += k[i] * z;
    }
    return;
  }
  vec W[2], A[2], U[2];
  LOAD(W, w + j) LOAD(A, a + j) LOAD(U, u + j)
  EACH(i, n) {
    const REAL wi = w[i], ai = a[i], ki = k[i];
    _Pragma("GCC unroll 2") EACH(h, V) {
      const vec z = (*(const vec *)(from + i * n + j + h * LANES) - wi * W[h]) * (ai * A[h]);
      *(vec *)(to + i * n + j + h * LANES) = z;
      U[h] += ki * z;
    }
  }
  KEEP(u + j, U)
}

/* Columns j, … of y += Z x. */
INLINE void times_columns(int V, int64_t n, int64_t j, const REAL *restrict Z, const REAL *restrict x, REAL *restrict y) {
  if (!V) {
    EACH(i, n) for (int64_t l = j; l < n; l++) y[l] += x[i] * Z[i * n + l];
    return;
  }
  vec Y[2];
  LOAD(Y, y + j)
  EACH(i, n) {
    const REAL xi = x[i];
    _Pragma("GCC unroll 2") EACH(h, V) Y[h] += xi * *(const vec *)(Z + i * n + j + h * LANES);
  }
  KEEP(y + j, Y)
}

/* Columns j, … of d += (du k' + k du')/2; net += column sums of d * Z, dk += Z du; then d = a d a. */
INLINE void back_columns(int V, int64_t n, int64_t j, REAL *restrict d, const REAL *restrict Z, const REAL *restrict k,
                         const REAL *restrict du, const REAL *restrict a, REAL *restrict net, REAL *restrict dk) {
  if (!V) {
    EACH(i, n) for (int64_t l = j; l < n; l++) {
      const REAL z = Z[i * n + l], dz = d[i * n + l] + (du[i] * k[l] + k[i] * du[l]) / 2;
      net[l] += dz * z;
      dk[l] += du[i] * z;
      d[i * n + l] = dz * (a[i] * a[l]);
    }
    return;
  }
  vec K[2], U[2], A[2], N[2], DK[2];
  LOAD(K, k + j) LOAD(U, du + j) LOAD(A, a + j) LOAD(N, net + j) LOAD(DK, dk + j)
  EACH(i, n) {
    const REAL ki = k[i] / 2, ui = du[i] / 2, whole = du[i], ai = a[i];
    _Pragma("GCC unroll 2") EACH(h, V) {
      REAL *at = d + i * n + j + h * LANES;
      const vec z = *(const vec *)(Z + i * n + j + h * LANES), dz = *(const vec *)at + (ui * K[h] + ki * U[h]);
      N[h] += dz * z;
      DK[h] += whole * z;
      *(vec *)at = dz * (ai * A[h]);
    }
  }
  KEEP(net + j, N)
  KEEP(dk + j, DK)
}

/* y += Z x for a symmetric block. */
static void block_times(int64_t n, const REAL *Z, const REAL *x, REAL *y) {
#define CALL(V) times_columns(V, n, j, Z, x, y)
  STRIPS(n, CALL)
#undef CALL
}

/* to = A (from - ww') A' + noise; u = to k. `to` may be `from`. */
static void predict(const Inputs *x, int64_t at, const REAL *from, REAL *to, const REAL *restrict w,
                    const REAL *restrict a, const REAL *restrict noise, REAL *restrict u) {
  int64_t D = x->D, n = x->n;
  const REAL *restrict k = x->k + at * D;
  memset(u, 0, D * sizeof(REAL));
  for (int64_t start = 0; start < D; start += n) {
    REAL *block = to + start * n;
#define CALL(V) fade_columns(V, n, j, from + start * n, block, w + start, a + start, k + start, u + start)
    STRIPS(n, CALL)
#undef CALL
    if (x->rotates) {
      turn_block(block, n, x->cos + (at * D + start) / 2, x->sin + (at * D + start) / 2, 1);
      memset(u + start, 0, n * sizeof(REAL));
      block_times(n, block, k + start, u + start);
    }
    EACH(i, n) {
      block[i * n + i] += noise[start + i];
      u[start + i] += k[start + i] * noise[start + i];
    }
  }
}

/* y = Z x, for symmetric blocks. */
static void times(const Inputs *in, const REAL *Z, const REAL *restrict x, REAL *restrict y) {
  int64_t D = in->D, n = in->n;
  memset(y, 0, D * sizeof(REAL));
  for (int64_t i = 0; i < D; i += n) block_times(n, Z + i * n, x + i, y + i);
}

/* y = P x, P being the blocks of Z - ww'. */
static void times_written(const Inputs *in, const REAL *Z, const REAL *w, const REAL *x, REAL *y) {
  int64_t D = in->D, n = in->n;
  times(in, Z, x, y);
  for (int64_t i = 0; i < D; i += n) add(y + i, -dot(w + i, x + i, n), w + i, n);
}

/* Z -= ww', and what rounding has left of asymmetry is averaged. */
static void downdate(const Inputs *x, REAL *Z, const REAL *w) {
  int64_t D = x->D, n = x->n;
  for (int64_t start = 0; start < D; start += n) {
    REAL *block = Z + start * n;
    EACH(i, n) {
      add(block + i * n, -w[start + i], w + start, n);
      EACH(j, i) block[i * n + j] = block[j * n + i] = (block[i * n + j] + block[j * n + i]) / 2;
    }
  }
}

static void forward_head(const Inputs *x, const Outputs *y, int64_t head, REAL *work) {
  int64_t T = x->T, H = x->H, G = x->G, D = x->D, C = x->C, K = (T + C - 1) / C, each = D * x->n;
  REAL *a = take(&work, D), *noise = take(&work, D), *restrict w = take(&work, D), *Pq = take(&work, D);
  EACH(g, G) {
    REAL *Z = y->P + (head * G + g) * each;
    memset(w, 0, D * sizeof(REAL));
    EACH(t, T) {
      int64_t at = ((head / H) * T + t) * H + head % H, out = at * G + g;
      REAL *restrict u = y->u + out * D;
      if (y->saved && t % C == 0) {
        downdate(x, Z, w);
        memset(w, 0, D * sizeof(REAL));
        memcpy(y->saved + ((head * G + g) * K + t / C) * each, Z, each * sizeof(REAL));
      }
      drift_of(x, at, a, noise);
      predict(x, at, Z, Z, w, a, noise, u);
      const REAL b = y->b[out] = 1 / (x->r2[out] + dot(x->k + at * D, u, D)), root = (REAL)sqrt(b > 0 ? b : 0);
      SIMD EACH(i, D) w[i] = root * u[i];
      if (y->variance) {
        const REAL *q = x->q + at * D;
        times_written(x, Z, w, q, Pq);
        const REAL variance = dot(q, Pq, D);
        y->variance[out] = variance > 0 ? variance : 0;
      }
    }
    downdate(x, Z, w);
  }
}

/* The part of the gradient of log decays, [D], that each of the R decays of a token has. */
INLINE void decay_back(const Inputs *x, REAL *restrict log_a, const REAL *restrict d) {
  int64_t D = x->D, n = x->n, half = n / 2;
  if (x->R == 1) {
    REAL total = 0;
    EACH(i, D) total += d[i];
    log_a[0] += total;
  } else if (x->R == D) {
    SIMD EACH(i, D) log_a[i] += d[i];
  } else {
    for (int64_t start = 0; start < D; start += n)
      EACH(i, half) log_a[start / 2 + i] += d[start + i] + d[start + i + half];
  }
}

/* One token back. dP [D,n]: gradient of P after it, and then before it. */
static void token_back(const Inputs *x, const Gradients *o, int64_t at, int64_t g, const REAL *Z, const REAL *a,
                       const REAL *noise, REAL *dP, REAL *room) {
  int64_t D = x->D, n = x->n, half = n / 2, out = at * x->G + g;
  REAL *restrict y = room, *restrict du = y + D, *restrict net = du + D, *ones = net + D;
  const REAL *restrict k = x->k + at * D, *restrict u = o->saved_u + out * D, *restrict from_u = o->u + out * D;
  const REAL b = o->saved_b[out], dv = o->variance ? o->variance[out] : 0;
  REAL *restrict dk = o->k + at * D;
  if (dv != 0) {
    const REAL *q = x->q + at * D, root = (REAL)sqrt(b > 0 ? b : 0);
    REAL *dq = o->q + at * D;
    SIMD EACH(i, D) du[i] = root * u[i];
    times_written(x, Z, du, q, y);
    if (dot(q, y, D) > 0) {
      add(dq, 2 * dv, y, D);
      for (int64_t start = 0; start < D; start += n)
        EACH(i, n) add(dP + (start + i) * n, dv * q[start + i], q + start, n);
    }
  }
  times(x, dP, u, y);
  const REAL ds = b * b * (dot(u, y, D) - o->b[out]); /* s = r2 + k'u = 1/b */
  o->r2[out] += ds;
  SIMD EACH(i, D) {
    du[i] = from_u[i] - 2 * b * y[i] + ds * k[i];
    dk[i] += ds * u[i];
  }
  memset(net, 0, D * sizeof(REAL));
  EACH(i, n) ones[i] = 1;
  REAL dl2 = 0;
  for (int64_t start = 0; start < D; start += n) {
    const REAL *as = x->rotates ? ones : a + start, *z = Z + start * n;
    REAL *d = dP + start * n;
    EACH(i, n) {
      const REAL own = d[i * n + i] + du[start + i] * k[start + i], ai = a[start + i];
      dl2 += own * (x->stationary ? (1 - ai) * (1 + ai) : x->rows[start + i]);
      net[start + i] -= own * (noise[start + i] + (x->stationary ? x->l2[at] * ai * ai : 0));
    }
#define CALL(V) back_columns(V, n, j, d, z, k + start, du + start, as, net + start, dk + start)
    STRIPS(n, CALL)
#undef CALL
    if (!x->rotates) continue;
    EACH(i, half) {
      const REAL *lower = d + (i + half) * n, other = noise[start + i] - noise[start + i + half];
      o->angle[(at * D + start) / 2 + i] +=
          2 * (dot(lower, z + i * n, n) - dot(d + i * n, z + (i + half) * n, n) - lower[i] * other);
    }
    turn_block(d, n, x->cos + (at * D + start) / 2, x->sin + (at * D + start) / 2, -1);
    EACH(i, n) SIMD EACH(j, n) d[i * n + j] *= a[start + i] * a[start + j];
  }
  o->l2[at] += dl2;
  SIMD EACH(i, D) net[i] *= 2;
  decay_back(x, o->log_a + at * x->R, net);
}

static void backward_head(const Inputs *x, const Gradients *o, int64_t head, REAL *work) {
  int64_t T = x->T, H = x->H, G = x->G, D = x->D, C = x->C, K = (T + C - 1) / C, each = D * x->n;
  REAL *a = take(&work, C * D), *noise = take(&work, C * D), *restrict w = take(&work, D), *u = take(&work, D);
  REAL *room = take(&work, 4 * D), *Z = take(&work, C * each);
  EACH(g, G) for (int64_t chunk = K - 1; chunk >= 0; chunk--) {
    int64_t start = chunk * C, c = least(C, T - start);
    const REAL *from = o->saved + ((head * G + g) * K + chunk) * each;
    memset(w, 0, D * sizeof(REAL));
    EACH(t, c) {
      int64_t at = ((head / H) * T + start + t) * H + head % H, out = at * G + g;
      drift_of(x, at, a + t * D, noise + t * D);
      predict(x, at, from, Z + t * each, w, a + t * D, noise + t * D, u);
      const REAL b = o->saved_b[out], root = (REAL)sqrt(b > 0 ? b : 0);
      SIMD EACH(i, D) w[i] = root * u[i];
      from = Z + t * each;
    }
    for (int64_t t = c - 1; t >= 0; t--) {
      int64_t at = ((head / H) * T + start + t) * H + head % H;
      token_back(x, o, at, g, Z + t * each, a + t * D, noise + t * D, o->P + (head * G + g) * each, room);
    }
  }
}

ENTRY(forward, Inputs, x, Outputs, y) {
  OVER_HEADS(4 * (x->D + 16), forward_head(x, y, head, work))
}

ENTRY(backward, Inputs, x, Gradients, o) {
  OVER_HEADS(x->D * (x->C * (x->n + 2) + 6) + 6 * 16, backward_head(x, o, head, work))
}
