/* The exact filter of the Bayesian Layer, token by token, with the belief of one head resident in cache.
 *
 * One call runs heads [first, last) of B*H, with all their noise groups, over T tokens. The letters are those of naive.py:
 *
 *     M = A M,  P = A P A' + l2 N,   u = P k,   b = 1/(r2 + k'u),   e = v - M'k,   M += b u e',   P -= b u u',   o = M'q
 *
 * Rows of a rotation come de-interleaved (real parts, then imaginary parts), so that the two rows of a pair lie D/2 apart
 * and every inner loop runs over neighbours. P is symmetric: its rows serve as columns. Matrices are row-major. REAL is
 * float or double. Nothing is checked here: the caller looks at b and the results.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef REAL
#define REAL float
#endif
#define EACH(i, n) for (int64_t i = 0; i < (n); i++)
#define SIMD _Pragma("omp simd")
#define INLINE static inline __attribute__((always_inline))

typedef struct {
  int64_t T, H, G, D, M;          /* M: value columns of one group */
  int64_t rotates;                /* whether drift turns pairs of rows */
  int64_t interval;               /* tokens between two saved beliefs */
  const REAL *q, *k, *v;          /* [B,T,H,D], [B,T,H,D], [B,T,H,G,M] */
  const REAL *l2, *r2;            /* [B,T,H], [B,T,H,G] */
  const REAL *a, *s;              /* decays [B,T,H,D] and NULL; or rho cos and rho sin, [B,T,H,D/2] each */
  const REAL *rows;               /* diagonal of N, [D] */
} Inputs;

typedef struct {
  REAL *M, *P;                    /* in: belief at the start, out: at the end; [B,H,G,D,M], [B,H,G,D,D] */
  REAL *o, *b, *e, *variance;     /* [B,T,H,G,M], [B,T,H,G], [B,T,H,G,M], [B,T,H,G] or NULL */
  REAL *saved_M, *saved_P;        /* beliefs before tokens 0, interval, …: [B,H,G,K,D,M], [B,H,G,K,D,D], or NULL */
} Outputs;

typedef struct {
  const REAL *saved_M, *saved_P;
  const REAL *o, *b, *e, *variance;  /* gradients of the outputs; variance may be NULL */
  REAL *M, *P;                       /* in: gradient of the belief at the end, out: at the start */
  REAL *q, *k, *v, *l2, *r2, *log_a, *angle; /* gradients of the inputs, zero at first; angle NULL without rotation */
} Gradients;

INLINE int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }

INLINE void add(REAL *restrict y, REAL c, const REAL *restrict x, int64_t n) { SIMD EACH(i, n) y[i] += c * x[i]; }

INLINE REAL dot(const REAL *restrict x, const REAL *restrict y, int64_t n) {
  REAL total = 0;
  _Pragma("omp simd reduction(+ : total)") EACH(i, n) total += x[i] * y[i];
  return total;
}

/* x, y = c x - s y, s x + c y */
INLINE void turn(REAL *restrict x, REAL *restrict y, REAL c, REAL s, int64_t n) {
  SIMD EACH(j, n) {
    REAL real = x[j], imaginary = y[j];
    x[j] = c * real - s * imaginary;
    y[j] = s * real + c * imaginary;
  }
}

/* The same for two halves of one row, each entry with a pair of its own; sign = -1 turns back. */
INLINE void turn_columns(REAL *restrict x, const REAL *restrict c, const REAL *restrict s, REAL sign, int64_t half) {
  REAL *restrict y = x + half;
  SIMD EACH(j, half) {
    REAL real = x[j], imaginary = y[j];
    x[j] = c[j] * real - sign * s[j] * imaginary;
    y[j] = sign * s[j] * real + c[j] * imaginary;
  }
}

/* M = A M, P = A P A'; or, with sign = -1, M = A' M, P = A' P A */
static void rotate(REAL *M, REAL *P, const REAL *c, const REAL *s, REAL sign, int64_t D, int64_t m) {
  int64_t half = D / 2;
  EACH(i, half) {
    turn(M + i * m, M + (i + half) * m, c[i], sign * s[i], m);
    turn(P + i * D, P + (i + half) * D, c[i], sign * s[i], D);
  }
  EACH(i, D) turn_columns(P + i * D, c, s, sign, half);
}

/* Drift, then look along k: M and P become the predicted belief, u = P k, and p = M'k is what memory predicts. */
INLINE void predict(REAL *restrict M, REAL *restrict P, REAL *restrict u, REAL *restrict p, const REAL *restrict k,
                    const REAL *restrict a, const REAL *restrict s, const REAL *restrict rows, REAL l2, int rotates,
                    int64_t D, int64_t m) {
  memset(u, 0, D * sizeof(REAL));
  memset(p, 0, m * sizeof(REAL));
  if (rotates) rotate(M, P, a, s, 1, D, m);
  EACH(i, D) {
    REAL *restrict Pi = P + i * D, *restrict Mi = M + i * m;
    REAL ki = k[i];
    if (rotates) {
      Pi[i] += l2 * rows[i];
      add(u, ki, Pi, D);
      add(p, ki, Mi, m);
    } else {
      REAL ai = a[i];
      SIMD EACH(j, D) Pi[j] *= ai * a[j];
      Pi[i] += l2 * rows[i];
      add(u, ki, Pi, D);
      SIMD EACH(j, m) {
        REAL x = ai * Mi[j];
        Mi[j] = x;
        p[j] += ki * x;
      }
    }
  }
}

/* One token. M, P: belief before and after. Keeps the predicted belief in predicted_M, predicted_P where asked. */
INLINE void step(const Inputs *x, int64_t at, int64_t g, REAL *M, REAL *P, REAL *u, REAL *e, REAL *b, REAL *predicted_M,
                 REAL *predicted_P, int64_t D, int64_t m) {
  int64_t R = x->rotates ? D / 2 : D;
  const REAL *k = x->k + at * D, *v = x->v + (at * x->G + g) * m;
  predict(M, P, u, e, k, x->a + at * R, x->rotates ? x->s + at * R : NULL, x->rows, x->l2[at], (int)x->rotates, D, m);
  if (predicted_M) memcpy(predicted_M, M, D * m * sizeof(REAL));
  if (predicted_P) memcpy(predicted_P, P, D * D * sizeof(REAL));
  *b = 1 / (x->r2[at * x->G + g] + dot(k, u, D));
  SIMD EACH(j, m) e[j] = v[j] - e[j];
  EACH(i, D) {
    REAL c = *b * u[i];
    add(P + i * D, -c, u, D);
    add(M + i * m, c, e, m);
  }
}

INLINE void forward_head(const Inputs *x, const Outputs *y, int64_t head, int64_t D, int64_t m, REAL *u) {
  int64_t T = x->T, H = x->H, G = x->G, K = (T + x->interval - 1) / x->interval;
  EACH(g, G) {
    int64_t n = head * G + g;
    REAL *M = y->M + n * D * m, *P = y->P + n * D * D;
    EACH(t, T) {
      int64_t at = ((head / H) * T + t) * H + head % H, out = at * G + g;
      if (y->saved_M && t % x->interval == 0) {
        int64_t slot = n * K + t / x->interval;
        memcpy(y->saved_M + slot * D * m, M, D * m * sizeof(REAL));
        memcpy(y->saved_P + slot * D * D, P, D * D * sizeof(REAL));
      }
      step(x, at, g, M, P, u, y->e + out * m, y->b + out, NULL, NULL, D, m);
      const REAL *q = x->q + at * D;
      REAL *o = y->o + out * m;
      memset(o, 0, m * sizeof(REAL));
      EACH(i, D) add(o, q[i], M + i * m, m);
      if (y->variance) {
        REAL total = 0;
        EACH(i, D) total += q[i] * dot(P + i * D, q, D);
        y->variance[out] = total;
      }
    }
  }
}

/* The adjoint of one token. dM, dP: gradient of the belief after it, and on return of the belief before it. */
INLINE void backward_step(const Inputs *x, const Gradients *d, int64_t at, int64_t g, REAL *restrict dM,
                          REAL *restrict dP, const REAL *restrict M, const REAL *restrict P, const REAL *restrict u,
                          const REAL *restrict e, REAL b, REAL *restrict du, REAL *restrict de, int64_t D, int64_t m) {
  int64_t out = at * x->G + g, half = D / 2, R = x->rotates ? half : D;
  const REAL *restrict q = x->q + at * D, *restrict k = x->k + at * D, *restrict grad_o = d->o + out * m;
  REAL *restrict dq = d->q + at * D, *restrict dk = d->k + at * D;

  /* o = M'q after the write, where M (after) = M + b u e' */
  REAL read = b * dot(e, grad_o, m);
  EACH(i, D) {
    dq[i] += dot(M + i * m, grad_o, m) + read * u[i];
    add(dM + i * m, q[i], grad_o, m);
  }
  if (d->variance && d->variance[out] != 0) {
    REAL c = d->variance[out], uq = b * dot(u, q, D);
    EACH(i, D) {
      dq[i] += 2 * c * (dot(P + i * D, q, D) - u[i] * uq);
      add(dP + i * D, c * q[i], q, D);
    }
  }

  /* M += b u e', P -= b u u' */
  memset(du, 0, D * sizeof(REAL));
  memset(de, 0, m * sizeof(REAL));
  EACH(i, D) add(du, u[i], dP + i * D, D);
  REAL db = d->b[out] - dot(u, du, D);
  EACH(i, D) {
    REAL *restrict dMi = dM + i * m;
    REAL w = dot(dMi, e, m);
    db += u[i] * w;
    du[i] = b * (w - 2 * du[i]);
    add(de, b * u[i], dMi, m);
  }
  add(de, 1, d->e + out * m, m);

  /* b = 1/(r2 + k'u), e = v - M'k, u = P k */
  REAL dr2 = -b * b * db;
  d->r2[out] = dr2;
  add(du, dr2, k, D);
  memcpy(d->v + out * m, de, m * sizeof(REAL));
  REAL l2 = x->l2[at], dl2 = 0;
  const REAL *restrict a = x->a + at * R, *restrict s = x->rotates ? x->s + at * R : NULL;
  EACH(i, D) {
    const REAL *restrict Mi = M + i * m, *restrict Pi = P + i * D;
    REAL *restrict dMi = dM + i * m, *restrict dPi = dP + i * D;
    REAL ki = k[i], hi = du[i] / 2, hk = ki / 2;
    REAL along = 0, drift = 0, predicted = 0;
    _Pragma("omp simd reduction(+ : predicted, drift)") EACH(j, m) {
      predicted += Mi[j] * de[j];
      REAL z = dMi[j] - ki * de[j];
      dMi[j] = z;
      drift += z * Mi[j];
    }
    REAL turned = 0;
    _Pragma("omp simd reduction(+ : along, turned)") EACH(j, D) {
      REAL z = dPi[j] + hi * k[j] + hk * du[j];
      dPi[j] = z;
      along += Pi[j] * du[j];
      turned += z * Pi[j];
    }
    dk[i] += dr2 * u[i] - predicted + along;
    dl2 += x->rows[i] * dPi[i];
    drift += 2 * (turned - l2 * x->rows[i] * dPi[i]);
    d->log_a[at * R + i % R] += drift;
  }
  d->l2[at] += dl2;
  if (x->rotates) {
    /* A turned by a little more is (I + J) A with J M = (-imaginary, real) */
    EACH(i, half) {
      int64_t h = i + half;
      REAL turn_M = dot(dM + h * m, M + i * m, m) - dot(dM + i * m, M + h * m, m);
      REAL turn_P = dot(dP + h * D, P + i * D, D) - dot(dP + i * D, P + h * D, D);
      turn_P -= l2 * (x->rows[i] * dP[h * D + i] - x->rows[h] * dP[i * D + h]);
      d->angle[at * R + i] += turn_M + 2 * turn_P;
    }
    rotate(dM, dP, a, s, -1, D, m);
  } else {
    EACH(i, D) {
      REAL ai = a[i], *restrict dMi = dM + i * m, *restrict dPi = dP + i * D;
      SIMD EACH(j, m) dMi[j] *= ai;
      SIMD EACH(j, D) dPi[j] *= ai * a[j];
    }
  }
}

INLINE void backward_head(const Inputs *x, const Gradients *d, int64_t head, int64_t D, int64_t m, REAL *work) {
  int64_t T = x->T, H = x->H, G = x->G, I = x->interval, K = (T + I - 1) / I;
  REAL *M = work, *P = M + D * m, *du = P + D * D, *de = du + D, *predicted_M = de + m;
  REAL *predicted_P = predicted_M + I * D * m, *u = predicted_P + I * D * D, *e = u + I * D, *b = e + I * m;
  EACH(g, G) {
    int64_t n = head * G + g;
    for (int64_t c = K - 1; c >= 0; c--) {
      int64_t start = c * I, count = least(I, T - start);
      memcpy(M, d->saved_M + (n * K + c) * D * m, D * m * sizeof(REAL));
      memcpy(P, d->saved_P + (n * K + c) * D * D, D * D * sizeof(REAL));
      EACH(j, count) {
        int64_t at = ((head / H) * T + start + j) * H + head % H;
        step(x, at, g, M, P, u + j * D, e + j * m, b + j, predicted_M + j * D * m, predicted_P + j * D * D, D, m);
      }
      for (int64_t j = count - 1; j >= 0; j--) {
        int64_t at = ((head / H) * T + start + j) * H + head % H;
        backward_step(x, d, at, g, d->M + n * D * m, d->P + n * D * D, predicted_M + j * D * m, predicted_P + j * D * D,
                      u + j * D, e + j * m, b[j], du, de, D, m);
      }
    }
  }
}

int64_t work_elements(const Inputs *x) {
  int64_t D = x->D, m = x->M, I = x->interval;
  return (I + 1) * (D * m + D * D + D + m) + I + D;
}

/* Sizes known to the compiler, for the head sizes that people use. */
#define SIZES(call)                                    \
  if (x->D == x->M && x->D == 16) { call(16, 16); }    \
  else if (x->D == x->M && x->D == 32) { call(32, 32); } \
  else if (x->D == x->M && x->D == 64) { call(64, 64); } \
  else if (x->D == x->M && x->D == 128) { call(128, 128); } \
  else { call(x->D, x->M); }

void forward(const Inputs *x, const Outputs *y, int64_t first, int64_t last) {
  REAL *u = malloc(x->D * sizeof(REAL));
  for (int64_t head = first; head < last; head++) {
#define CALL(D, M) forward_head(x, y, head, D, M, u)
    SIZES(CALL)
#undef CALL
  }
  free(u);
}

void backward(const Inputs *x, const Gradients *d, int64_t first, int64_t last) {
  REAL *work = malloc(work_elements(x) * sizeof(REAL));
  for (int64_t head = first; head < last; head++) {
#define CALL(D, M) backward_head(x, d, head, D, M, work)
    SIZES(CALL)
#undef CALL
  }
  free(work);
}
