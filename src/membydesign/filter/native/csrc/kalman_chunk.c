/* The exact filter of the Bayesian Layer, chunk by chunk: the formulas and letters of filter/torch/dense.py, in C.
 *
 * Heads run in parallel, each with all its noise groups. For a chunk that starts from the belief (M0, P0), with R the
 * upper triangular factor of G = R'R:
 *
 *     U = Kt P0,   G = U Kt' + noise + r2,   [X | E | W] = R'^-1 [fC U + exits | V - Kt M0 | U Qt' + noise]
 *     o = Qt M0 + W'E,   b |e|^2 = |E_t|^2,   M = fC M0 + X'E,   P = fC P0 fC + nC - X'X,   variance = Qt P0 Qt' + q n q' - W'W,   b = 1/R_tt^2
 *
 * Forward saves the belief at every chunk's start (and at the end); backward computes the inside of a chunk anew. b is
 * -1 where a covariance was not positive definite, or is not at the end, and the caller looks.
 */
#include "frame.h"
#include "kalman.h"
#include "positive.h"
#include "wide.h"

/* What all noise groups of a chunk share. */
typedef struct {
  Frame F;
  int mixed;              /* whether process noise differs between the rows of a pair: then N is not diagonal in the frame */
  REAL *k, *q, *kt, *qt;  /* [c,D]: in the frame; and faded from the start */
  REAL *n, *across;       /* [c,R], [c,D/2]: noise built up (times `rows` where R = 1), and between the rows of a pair */
  REAL *noisy, *exits;    /* [c,D]: N k, and what is left of it at the chunk's end */
  REAL *kk, *qk;          /* [c,c]: decayed products of k and q with N k */
} Shared;

/* What one group makes of a chunk. */
typedef struct {
  int64_t width;    /* D + M + c: the columns of Y, which are X, E and W */
  REAL *U, *R, *Y;  /* [c,D], [c,c], [c,width] */
  double *wide;     /* room for the same in double */
  double *X, *P;    /* of that, X as columns of Y and P0, if this chunk was conditioned on in double; else NULL */
} Inside;

static int64_t widest(const Inputs *x) { return x->D + x->M + x->C; }

static Shared shared_room(const Inputs *x, REAL **work) {
  int64_t C = x->C, D = x->D;
  Shared s = {.F = frame_room(C, D, x->R, (int)x->rotates, widest(x), work)};
  REAL **rows[] = {&s.k, &s.q, &s.kt, &s.qt, &s.n, &s.across, &s.noisy, &s.exits};
  EACH(i, 8) *rows[i] = take(work, C * D);
  s.kk = take(work, C * C);
  s.qk = take(work, C * C);
  EACH(i, D / 2) s.mixed |= x->rotates && x->rows[i] != x->rows[i + D / 2];
  return s;
}

static int64_t wide_elements(const Inputs *x) {
  int64_t C = x->C, D = x->D, M = x->M;
  return 3 * C * D + D * D + D * M + C * C + C * widest(x) + widest(x) * 64 / (int64_t)sizeof(double) * 2;
}

static Inside inside_room(const Inputs *x, REAL **work) {
  Inside y = {.U = take(work, x->C * x->D), .R = take(work, x->C * x->C), .Y = take(work, x->C * widest(x))};
  y.wide = (double *)take(work, wide_elements(x) * (int64_t)(sizeof(double) / sizeof(REAL)));
  return y;
}

static int64_t work_elements(const Inputs *x) {
  int64_t C = x->C, D = x->D, M = x->M;
  return frame_elements(C, D, widest(x)) + 24 * C * D + C * M + 8 * C * C + 2 * C * widest(x) + 2 * D +
         2 * wide_elements(x) + D * (D + TILE_COLUMNS) + 64 * 16;
}

/* N y of one token: diagonal, or with a 2x2 block for each pair. */
INLINE void noisy_row(const Shared *s, const REAL *rows, int64_t t, REAL *restrict to, const REAL *restrict y) {
  int64_t D = s->F.D, half = D / 2;
  const REAL *restrict n = s->n + t * s->F.R, *restrict x = s->across + t * half;
  scaled(to, n, y, s->F.R, D);
  if (s->F.R == 1) SIMD EACH(i, D) to[i] *= rows[i];
  if (s->mixed) EACH(i, half) to[i] += x[i] * y[i + half], to[i + half] += x[i] * y[i];
}

/* The part of l2 that stationary noise puts into each row at token t, [R]. */
INLINE void entering(const Inputs *x, const Shared *s, int64_t t, int64_t first, REAL *restrict to) {
  const REAL *restrict log_a = x->log_a + (first + t * x->H) * x->R, *restrict a = s->F.a + t * s->F.R;
  SIMD EACH(i, x->R) to[i] = replaced(2 * log_a[i], a[i] * a[i]);
  for (int64_t i = x->R; i < s->F.R; i++) to[i] = to[i - x->R];
}

/* Tokens start … start+c-1 of a head; `first` is its first token's index in [B,T,H]. */
static void share(const Inputs *x, Shared *s, int64_t first, int64_t c) {
  int64_t D = x->D, H = x->H, half = D / 2, R = s->F.R;
  Frame *F = &s->F;
  const REAL *cos = x->cos ? x->cos + first * half : NULL, *sin = x->sin ? x->sin + first * half : NULL;
  frame_of(F, c, x->a + first * x->R, cos, sin, x->R, H);
  enter(F, s->k, x->k + first * D, H * D);
  enter(F, s->q, x->q + first * D, H * D);
  EACH(t, c) {
    REAL *n = s->n + t * R, *across = s->across + t * half, l2 = x->l2[first + t * H];
    const REAL *a = F->a + t * R;
    if (x->log_a) {
      entering(x, s, t, first, n);
      EACH(i, R) n[i] = l2 * n[i] + (t ? a[i] * a[i] * n[i - R] : 0);
    }
    else EACH(i, R) n[i] = l2 * (R == 1 ? 1 : x->rows[i]) + (t ? a[i] * a[i] * n[i - R] : 0);
    if (s->mixed) EACH(i, half) { /* R(-Theta) diag(rows) R(-Theta)', entry by entry */
      REAL r = F->cos[t * half + i], v = F->sin[t * half + i], real = x->rows[i], imaginary = x->rows[i + half];
      REAL aa = a[i] * a[i];
      n[i] = l2 * (r * r * real + v * v * imaginary) + (t ? aa * n[i - D] : 0);
      n[i + half] = l2 * (v * v * real + r * r * imaginary) + (t ? aa * n[i + half - D] : 0);
      across[i] = l2 * r * v * (imaginary - real) + (t ? aa * across[i - half] : 0);
    }
    scaled(s->kt + t * D, F->f + t * R, s->k + t * D, R, D);
    scaled(s->qt + t * D, F->f + t * R, s->q + t * D, R, D);
    noisy_row(s, x->rows, t, s->noisy + t * D, s->k + t * D);
  }
  decayed_products(F, s->k, s->q, s->noisy, s->kk, s->qk, s->exits);
}

/* The right-hand sides of all tokens, but for the products: what noise, the value and r2 contribute. */
#define RIGHT_HAND_SIDES                                                                          \
  EACH(t, c) {                                                                                    \
    int64_t at = (first + t * H) * x->G + g;                                                      \
    const REAL *exits = s->exits + t * D, *v = x->v + at * m, *qk = s->qk + t * c, *kk = s->kk + t * c, one = end[0]; \
    if (R == 1) SIMD EACH(i, D) Y[t * w + i] = one * U[t * D + i] + exits[i];                     \
    else SIMD EACH(i, D) Y[t * w + i] = end[i] * U[t * D + i] + exits[i];                         \
    SIMD EACH(j, m) Y[t * w + D + j] = v[j];                                                      \
    EACH(u, t) Y[t * w + D + m + u] = 0;                                                          \
    SIMD for (int64_t u = t; u < c; u++) {                                                        \
      Y[t * w + D + m + u] += qk[u];                                                              \
      G[t * c + u] += kk[u];                                                                      \
    }                                                                                             \
    G[t * c + t] += x->r2[at];                                                                    \
  }

/* `condition` in double: where writes are far more certain than memory, R is made of differences between almost equal
 * numbers, which would otherwise cost more digits than the filter does token by token. */
static int64_t condition_wide(const Inputs *x, const Shared *s, Inside *y, const REAL *M, const REAL *P, int64_t first,
                              int64_t g) {
  int64_t c = s->F.c, D = x->D, m = x->M, H = x->H, R = s->F.R, w = y->width;
  const REAL *end = s->F.f + (c - 1) * R;
  double *kt = y->wide, *qt = kt + c * D, *U = qt + c * D, *P0 = U + c * D, *M0 = P0 + D * D, *G = M0 + D * m;
  double *Y = G + c * c, *panel = Y + c * w;
  EACH(i, c * D) kt[i] = s->kt[i], qt[i] = s->qt[i];
  EACH(i, D * D) P0[i] = P[i];
  EACH(i, D * m) M0[i] = M[i];
  wide_product(c, D, D, wide_view(kt, D), wide_view(P0, D), U, D, wide_SET, panel);
  wide_product(c, c, D, wide_view(U, D), wide_transposed(kt, D), G, c, wide_SET_UPPER, panel);
  wide_product(c, c, D, wide_view(U, D), wide_transposed(qt, D), Y + D + m, w, wide_SET_UPPER, panel);
  RIGHT_HAND_SIDES
  wide_product(c, m, D, wide_view(kt, D), wide_view(M0, m), Y + D, w, wide_SUBTRACT, panel);
  int64_t failed = wide_cholesky(G, c, panel);
  wide_solve(G, c, Y, w, w, panel);
  EACH(i, c * D) y->U[i] = (REAL)U[i];
  EACH(i, c * c) y->R[i] = (REAL)G[i];
  EACH(i, c * w) y->Y[i] = (REAL)Y[i];
  y->X = Y, y->P = P0;
  return failed;
}

/* U, R and Y from the belief at the chunk's start; in double if a variance is more than `sure` times its write noise.
 * Returns the first token whose pivot is not positive, or -1. */
static int64_t condition(const Inputs *x, const Shared *s, Inside *y, const REAL *M, const REAL *P, int64_t first,
                         int64_t g) {
  int64_t c = s->F.c, D = x->D, m = x->M, H = x->H, R = s->F.R, w = D + m + c;
  const REAL *end = s->F.f + (c - 1) * R;
  REAL *panel = s->F.panel, *U = y->U, *G = y->R, *Y = y->Y;
  y->width = w, y->X = y->P = NULL;
  product(c, D, D, view(s->kt, D), view(P, D), U, D, SET, panel);
  product(c, c, D, view(U, D), transposed(s->kt, D), G, c, SET_UPPER, panel);
  product(c, c, D, view(U, D), transposed(s->qt, D), Y + D + m, w, SET_UPPER, panel);
  RIGHT_HAND_SIDES
  product(c, m, D, view(s->kt, D), view(M, m), Y + D, w, SUBTRACT, panel);
  int wide = 0;
  EACH(t, c) wide |= sizeof(REAL) < sizeof(double) && G[t * c + t] > (REAL)x->sure * x->r2[(first + t * H) * x->G + g];
  int64_t failed = wide ? condition_wide(x, s, y, M, P, first, g) : cholesky(G, c, panel);
  if (!wide) solve(G, c, Y, w, w, panel);
  EACH(t, c) {
    memset(G + t * c, 0, t * sizeof(REAL));
    memset(Y + t * w + D + m, 0, t * sizeof(REAL)); /* a read sees no later write */
  }
  return failed;
}

/* P [n,n] symmetric from its upper triangle. */
static void mirror(REAL *P, int64_t n) {
  for (int64_t i = 0; i < n; i += 16)
    for (int64_t j = i; j < n; j += 16)
      for (int64_t r = i; r < least(i + 16, n); r++)
        for (int64_t u = j > r ? j : r + 1; u < least(j + 16, n); u++) P[u * n + r] = P[r * n + u];
}

/* M = f M and P = f P f. */
static void fade(REAL *M, REAL *P, const REAL *f, int64_t R, int64_t D, int64_t m) {
  EACH(i, D) {
    REAL fi = f[R == 1 ? 0 : i];
    scaled(M + i * m, &fi, M + i * m, 1, m);
    scaled(P + i * D, f, P + i * D, R, D);
    scaled(P + i * D, &fi, P + i * D, 1, D);
  }
}

static void exit_chunk(const Inputs *x, const Shared *s, const Inside *y, REAL *M, REAL *P) {
  int64_t c = s->F.c, D = x->D, m = x->M, half = D / 2, R = s->F.R, w = y->width;
  const REAL *n = s->n + (c - 1) * R, *across = s->across + (c - 1) * half, *f = s->F.f + (c - 1) * R;
  if (y->X) { /* P0 - X'X in double as well, upper triangle */
    EACH(i, D) for (int64_t j = i; j < D; j++) y->P[i * D + j] *= (double)f[R == 1 ? 0 : i] * f[R == 1 ? 0 : j];
    wide_product(D, D, c, wide_transposed(y->X, w), wide_view(y->X, w), y->P, D, wide_SUBTRACT_UPPER, y->X + c * w);
  }
  fade(M, P, f, R, D, m);
  product(D, m, c, transposed(y->Y, w), view(y->Y + D, w), M, m, ADD, s->F.panel);
  if (y->X) EACH(i, D) for (int64_t j = i; j < D; j++) P[i * D + j] = (REAL)y->P[i * D + j];
  EACH(i, D) P[i * D + i] += R == 1 ? n[0] * x->rows[i] : n[i];
  if (s->mixed) EACH(i, half) P[i * D + i + half] += across[i];
  if (!y->X) product(D, D, c, transposed(y->Y, w), view(y->Y, w), P, D, SUBTRACT_UPPER, s->F.panel);
  mirror(P, D);
  if (x->rotates) {
    turn_memory(&s->F, M, m, m, 1);
    turn_covariance(&s->F, P, 1);
    mirror(P, D); /* symmetric to the last bit */
  }
}

static void outputs(const Inputs *x, const Outputs *o, const Shared *s, const Inside *y, const REAL *M, const REAL *P,
                    int64_t first, int64_t g, int64_t failed, REAL *work) {
  int64_t c = s->F.c, D = x->D, m = x->M, w = y->width, step = x->H * x->G, at = first * x->G + g;
  const REAL *W = y->Y + D + m;
  product(c, m, D, view(s->qt, D), view(M, m), o->o + at * m, step * m, SET, s->F.panel);
  product(c, m, c, transposed(W, w), view(y->Y + D, w), o->o + at * m, step * m, ADD, s->F.panel);
  if (o->variance) product(c, D, D, view(s->qt, D), view(P, D), work, D, SET, s->F.panel);
  EACH(t, c) {
    REAL pivot = y->R[t * c + t];
    o->b[at + t * step] = t == failed ? -1 : 1 / (pivot * pivot);
    if (o->squares) o->squares[at + t * step] = dot(y->Y + t * w + D, y->Y + t * w + D, m);
    if (!o->variance) continue;
    REAL total = dot(work + t * D, s->qt + t * D, D);
    REAL *noisy = work + c * D;
    noisy_row(s, x->rows, t, noisy, s->q + t * D);
    total += dot(noisy, s->q + t * D, D);
    EACH(u, t + 1) total -= W[u * w + t] * W[u * w + t];
    o->variance[at + t * step] = total;
  }
}

static void forward_head(const Inputs *x, const Outputs *o, int64_t head, REAL *work) {
  int64_t T = x->T, H = x->H, G = x->G, D = x->D, m = x->M, C = x->C, K = (T + C - 1) / C;
  Shared s = shared_room(x, &work);
  Inside y = inside_room(x, &work);
  EACH(i, K + 1) {
    int64_t start = i * C, c = least(C, T - start), first = ((head / H) * T + start) * H + head % H;
    if (i < K) share(x, &s, first, c);
    EACH(g, G) {
      int64_t n = head * G + g, slot = n * (K + 1) + i;
      REAL *M = o->M + n * D * m, *P = o->P + n * D * D;
      if (o->saved_M) {
        memcpy(o->saved_M + slot * D * m, M, D * m * sizeof(REAL));
        memcpy(o->saved_P + slot * D * D, P, D * D * sizeof(REAL));
      }
      if (i == K) {
        if (indefinite(P, D, work)) lost(x, o, head, g);
        continue;
      }
      int64_t failed = condition(x, &s, &y, M, P, first, g);
      outputs(x, o, &s, &y, M, P, first, g, failed, work);
      exit_chunk(x, &s, &y, M, P);
    }
  }
}

ENTRY(forward, Inputs, x, Outputs, o) {
  OVER_HEADS(work_elements(x), forward_head(x, o, head, work))
}

#include "kalman_chunk_back.h"
