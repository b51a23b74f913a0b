/* The exact filter of the Bayesian Layer, token by token, with the belief of one head resident in cache.
 *
 * Heads (B*H of them) run in parallel, each with all its noise groups over T tokens. The letters are those of naive.py:
 *
 *     M = A M,  P = A P A' + l2 N,   u = P k,   b = 1/(r2 + k'u),   e = v - M'k,   M += b u e',   P -= b u u',   o = M'q
 *
 * Rows of a rotation come de-interleaved (real parts, then imaginary parts), so that the two rows of a pair lie D/2 apart
 * and every inner loop runs over neighbours. P is symmetric: its rows serve as columns. The caller looks at b and the
 * results; b of the last write is -1 where P has lost its positivity by the end.
 */
#include "blocks.h"
#include "kalman.h"
#include "positive.h"
#include "sweeps.h"

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

/* A write that has been decided but not yet carried out: P -= c u', M += c e'. It is carried out when the next token
 * passes over P and M anyway, so that each is read and written once per token. */
typedef struct {
  REAL *c, *u, *e;
} Pending;

/* The decays of a token, one for each row; or rho cos and then rho sin of each pair. `spread` has room for them. */
INLINE const REAL *decays(const Inputs *x, int64_t at, REAL *spread, int64_t D) {
  if (x->rotates) {
    const REAL *a = x->a + at * x->R, *c = x->cos + at * x->R, *s = x->sin + at * x->R;
    SIMD EACH(i, D / 2) spread[i] = a[i] * c[i], spread[i + D / 2] = a[i] * s[i];
    return spread;
  }
  if (x->R != 1) return x->a + at * x->R;
  REAL a = x->a[at];
  SIMD EACH(i, D) spread[i] = a;
  return spread;
}

/* The part of l2 that enters each row. `spread` has room for them. */
INLINE const REAL *entering(const Inputs *x, int64_t at, REAL *restrict spread, int64_t D) {
  if (!x->log_a) return x->rows;
  const REAL *restrict log_a = x->log_a + at * x->R, *restrict a = x->a + at * x->R;
  SIMD EACH(i, x->R) spread[i] = replaced(2 * log_a[i], a[i] * a[i]);
  for (int64_t i = x->R; i < D; i++) spread[i] = spread[i - x->R];
  return spread;
}

/* One token: carry out the pending write, read it along `last_q` into `o`, drift, and decide the next write.
 * from_M, from_P → to_M, to_P is the belief predicted for this token; u, e, b are what its write will do. */
INLINE void token(const Inputs *x, int64_t at, int64_t g, const REAL *from_M, const REAL *from_P, REAL *to_M, REAL *to_P,
                  const Pending *before, const REAL *last_q, REAL *o, REAL *u, REAL *e, REAL *b, REAL *spread, int64_t D,
                  int64_t m) {
  const REAL *k = x->k + at * D, *v = x->v + (at * x->G + g) * m, *a = decays(x, at, spread, D);
  memset(u, 0, D * sizeof(REAL));
  memset(e, 0, m * sizeof(REAL));
  memset(o, 0, m * sizeof(REAL));
  if (x->rotates) {
    const REAL *s = a + D / 2;
    turn_P(to_P, from_P, before->c, before->u, a, s, k, u, D);
    turn_M(to_M, from_M, before->c, before->e, last_q, o, a, s, k, e, D, m);
  } else {
    sweep_P(to_P, from_P, before->c, before->u, a, k, u, D);
    sweep_M(to_M, from_M, before->c, before->e, last_q, o, a, k, e, D, m);
  }
  const REAL l2 = x->l2[at], *N = entering(x, at, spread, D); /* decays are no longer needed */
  EACH(i, D) {
    to_P[i * D + i] += l2 * N[i];
    u[i] += l2 * N[i] * k[i];
  }
  *b = 1 / (x->r2[at * x->G + g] + dot(k, u, D));
  SIMD EACH(j, m) e[j] = v[j] - e[j];
}

/* Carry out a pending write with nothing to drift. */
INLINE void settle(REAL *M, REAL *P, const Pending *write, int64_t D, int64_t m) {
  EACH(i, D) {
    add(P + i * D, -write->c[i], write->u, D);
    add(M + i * m, write->c[i], write->e, m);
    write->c[i] = 0;
  }
}

/* c = u = √b u and e = √b e, so that P stays symmetric to the last bit. */
INLINE void decide(Pending *write, REAL b, const REAL *u, const REAL *e, int64_t D, int64_t m) {
  REAL root = (REAL)sqrt(b);
  SIMD EACH(i, D) write->c[i] = write->u[i] = root * u[i];
  SIMD EACH(j, m) write->e[j] = root * e[j];
}

INLINE void read_M(REAL *restrict o, const REAL *restrict q, const REAL *restrict M, int64_t D, int64_t m) {
  memset(o, 0, m * sizeof(REAL));
  EACH(i, D) add(o, q[i], M + i * m, m);
}

INLINE void forward_head(const Inputs *x, const Outputs *y, int64_t head, int64_t D, int64_t m, REAL *work) {
  int64_t T = x->T, H = x->H, G = x->G, K = (T + x->C - 1) / x->C;
  REAL *u = work, *spread = u + D, *nowhere = spread + D, *e = nowhere + m;
  Pending write = {e + m, e + m + D, e + m + 2 * D};
  REAL *room = e + 2 * m + 2 * D;
  EACH(g, G) {
    int64_t n = head * G + g;
    REAL *M = y->M + n * D * m, *P = y->P + n * D * D, *o = nowhere;
    const REAL *q = x->q + ((head / H) * T * H + head % H) * D;
    memset(write.c, 0, (2 * D + m) * sizeof(REAL));
    EACH(t, T) {
      int64_t at = ((head / H) * T + t) * H + head % H, out = at * G + g;
      if (y->saved_M && t % x->C == 0) {
        int64_t slot = n * (K + 1) + t / x->C;
        if (t) read_M(o, q, (settle(M, P, &write, D, m), M), D, m);
        memcpy(y->saved_M + slot * D * m, M, D * m * sizeof(REAL));
        memcpy(y->saved_P + slot * D * D, P, D * D * sizeof(REAL));
        o = nowhere;
      }
      token(x, at, g, M, P, M, P, &write, q, o, u, e, y->b + out, spread, D, m);
      decide(&write, y->b[out], u, e, D, m);
      if (y->squares) y->squares[out] = y->b[out] * dot(e, e, m);
      q = x->q + at * D;
      o = y->o + out * m;
      if (y->variance) { /* q'P q after the write, P being still the predicted one */
        REAL total = 0, along = dot(u, q, D);
        EACH(i, D) total += q[i] * dot(P + i * D, q, D);
        y->variance[out] = total - y->b[out] * along * along;
      }
    }
    settle(M, P, &write, D, m);
    read_M(o, q, M, D, m);
    EACH(i, D) EACH(j, i) P[i * D + j] = P[j * D + i] = (P[i * D + j] + P[j * D + i]) / 2; /* to the last bit */
    if (indefinite(P, D, room)) lost(x, y, head, g);
    if (y->saved_M) {
      memcpy(y->saved_M + (n * (K + 1) + K) * D * m, M, D * m * sizeof(REAL));
      memcpy(y->saved_P + (n * (K + 1) + K) * D * D, P, D * D * sizeof(REAL));
    }
  }
}

/* The adjoint of one token. dM, dP: gradient of the belief after it, and on return of the belief before it. */
INLINE void backward_step(const Inputs *x, const Gradients *d, int64_t at, int64_t g, REAL *restrict dM,
                          REAL *restrict dP, const REAL *restrict M, const REAL *restrict P, const REAL *restrict u,
                          const REAL *restrict e, REAL b, REAL *restrict du, REAL *restrict de, REAL *restrict spread,
                          int64_t D, int64_t m) {
  int64_t out = at * x->G + g, half = D / 2, R = x->R, rotates = x->rotates;
  const REAL *restrict q = x->q + at * D, *restrict k = x->k + at * D, *restrict grad_o = d->o + out * m;
  const REAL *restrict a = decays(x, at, spread, D), *restrict N = entering(x, at, spread + D, D);
  REAL *restrict dq = d->q + at * D, *restrict dk = d->k + at * D;

  if (d->variance && d->variance[out] != 0) { /* q'P q - b (u'q)^2 */
    REAL c = d->variance[out], uq = b * dot(u, q, D);
    EACH(i, D) {
      dq[i] += 2 * c * (dot(P + i * D, q, D) - u[i] * uq);
      add(dP + i * D, c * q[i], q, D);
    }
  }

  /* P -= b u u': du = dP u for now */
  memset(du, 0, D * sizeof(REAL));
  int64_t i = 0;
  for (; i + 4 <= D; i += 4) {
    const REAL *z[4] = {ROW4(dP + i * D, D)};
    const REAL u0 = u[i], u1 = u[i + 1], u2 = u[i + 2], u3 = u[i + 3];
    SIMD EACH(j, D) du[j] += (u0 * z[0][j] + u1 * z[1][j]) + (u2 * z[2][j] + u3 * z[3][j]);
  }
  for (; i < D; i++) add(du, u[i], dP + i * D, D);
  REAL db = (d->b ? d->b[out] : 0) - dot(u, du, D);

  /* o = M'q and M += b u e' */
  memset(de, 0, m * sizeof(REAL));
  if (d->squares) {
    add(de, 2 * b * d->squares[out], e, m);
    db += d->squares[out] * dot(e, e, m);
  }
  REAL read = b * dot(e, grad_o, m);
  EACH(r, D) {
    const REAL *restrict Mr = M + r * m;
    REAL *restrict dMr = dM + r * m;
    REAL qr = q[r], bu = b * u[r], kept = 0, w = 0;
    _Pragma("omp simd reduction(+ : kept, w)") EACH(j, m) {
      REAL z = dMr[j] + qr * grad_o[j];
      dMr[j] = z;
      kept += Mr[j] * grad_o[j];
      w += z * e[j];
      de[j] += bu * z;
    }
    dq[r] += kept + read * u[r];
    db += u[r] * w;
    du[r] = b * (w - 2 * du[r]);
  }

  /* b = 1/(r2 + k'u), e = v - M'k, u = P k, and the drift */
  REAL dr2 = -b * b * db, l2 = x->l2[at], dl2 = 0;
  d->r2[out] = dr2;
  add(du, dr2, k, D);
  memcpy(d->v + out * m, de, m * sizeof(REAL));
  EACH(r, D) {
    const REAL *restrict Mr = M + r * m, *restrict Pr = P + r * D;
    REAL *restrict dMr = dM + r * m, *restrict dPr = dP + r * D;
    REAL kr = k[r], hu = du[r] / 2, hk = kr / 2, ar = rotates ? 1 : a[r];
    REAL along = 0, drift = 0, predicted = 0, turned = 0;
    _Pragma("omp simd reduction(+ : predicted, drift)") EACH(j, m) {
      REAL z = dMr[j] - kr * de[j];
      predicted += Mr[j] * de[j];
      drift += z * Mr[j];
      dMr[j] = ar * z;
    }
    REAL own = dPr[r] + hu * k[r] + hk * du[r]; /* the diagonal entry, before it is scaled */
    if (rotates) {
      _Pragma("omp simd reduction(+ : along, turned)") EACH(j, D) {
        REAL z = dPr[j] + hu * k[j] + hk * du[j];
        along += Pr[j] * du[j];
        turned += z * Pr[j];
        dPr[j] = z;
      }
    } else {
      _Pragma("omp simd reduction(+ : along, turned)") EACH(j, D) {
        REAL z = dPr[j] + hu * k[j] + hk * du[j];
        along += Pr[j] * du[j];
        turned += z * Pr[j];
        dPr[j] = (ar * a[j]) * z;
      }
    }
    dk[r] += dr2 * u[r] - predicted + along;
    dl2 += N[r] * own;
    /* P holds l2 N besides A P A'; stationary noise loses what a larger decay keeps, which makes it l2 I */
    d->log_a[at * R + r % R] += drift + 2 * (turned - l2 * (x->log_a ? 1 : N[r]) * own);
  }
  d->l2[at] += dl2;
  if (rotates) {
    /* A turned by a little more is (I + J) A with J M = (-imaginary, real) */
    EACH(r, half) {
      int64_t h = r + half;
      REAL turn_of_M = dot(dM + h * m, M + r * m, m) - dot(dM + r * m, M + h * m, m);
      REAL turn_of_P = dot(dP + h * D, P + r * D, D) - dot(dP + r * D, P + h * D, D);
      turn_of_P -= l2 * (N[r] * dP[h * D + r] - N[h] * dP[r * D + h]);
      d->angle[at * R + r] += turn_of_M + 2 * turn_of_P;
    }
    rotate(dM, dP, a, a + half, -1, D, m);
  }
}

INLINE void backward_head(const Inputs *x, const Gradients *d, int64_t head, int64_t D, int64_t m, REAL *work) {
  int64_t T = x->T, H = x->H, G = x->G, I = x->C, K = (T + I - 1) / I;
  REAL *du = work, *spread = du + D, *de = spread + 2 * D, *nowhere = de + m, *zero = nowhere + m;
  Pending write = {zero + D, zero + 2 * D, zero + 3 * D};
  REAL *predicted_M = zero + 3 * D + m, *predicted_P = predicted_M + I * D * m;
  REAL *u = predicted_P + I * D * D, *e = u + I * D, *b = e + I * m;
  memset(zero, 0, D * sizeof(REAL));
  EACH(g, G) {
    int64_t n = head * G + g;
    for (int64_t c = K - 1; c >= 0; c--) {
      int64_t start = c * I, count = least(I, T - start);
      const REAL *M = d->saved_M + (n * (K + 1) + c) * D * m, *P = d->saved_P + (n * (K + 1) + c) * D * D;
      memset(write.c, 0, (2 * D + m) * sizeof(REAL));
      EACH(j, count) { /* the predicted beliefs of this stretch, each from the one before it */
        int64_t at = ((head / H) * T + start + j) * H + head % H;
        REAL *to_M = predicted_M + j * D * m, *to_P = predicted_P + j * D * D;
        token(x, at, g, M, P, to_M, to_P, &write, zero, nowhere, u + j * D, e + j * m, b + j, spread, D, m);
        decide(&write, b[j], u + j * D, e + j * m, D, m);
        M = to_M, P = to_P;
      }
      for (int64_t j = count - 1; j >= 0; j--) {
        int64_t at = ((head / H) * T + start + j) * H + head % H;
        backward_step(x, d, at, g, d->M + n * D * m, d->P + n * D * D, predicted_M + j * D * m, predicted_P + j * D * D,
                      u + j * D, e + j * m, b[j], du, de, spread, D, m);
      }
    }
  }
}

static int64_t work_elements(const Inputs *x) {
  int64_t D = x->D, m = x->M, I = x->C;
  return I * (D * m + D * D + D + m + 1) + 7 * D + 3 * m;
}

/* Sizes known to the compiler, for the head sizes that people use. */
#define SIZES(call)                                    \
  if (x->D == x->M && x->D == 16) { call(16, 16); }    \
  else if (x->D == x->M && x->D == 32) { call(32, 32); } \
  else if (x->D == x->M && x->D == 64) { call(64, 64); } \
  else if (x->D == x->M && x->D == 128) { call(128, 128); } \
  else { call(x->D, x->M); }

#define FORWARD(D, M) forward_head(x, y, head, D, M, work)
ENTRY(forward, Inputs, x, Outputs, y) {
  OVER_HEADS(4 * x->D + 3 * x->M + x->D * (x->D + TILE_COLUMNS), SIZES(FORWARD))
}

#define BACKWARD(D, M) backward_head(x, d, head, D, M, work)
ENTRY(backward, Inputs, x, Gradients, d) {
  OVER_HEADS(work_elements(x), SIZES(BACKWARD))
}
