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
 *
 * Where there are fewer heads than threads, each thread prepares a chunk (`share`), and all of them pass through these
 * chunks in turn, each with its columns of every product and solve. The factorisation is one thread's.
 */
#include "frame.h"
#include "kalman.h"
#include "positive.h"
#include "team.h"
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
  REAL *seen;       /* [c,D]: Qt P0, for the variance */
  int64_t failed;   /* the first token whose pivot is not positive, or -1 */
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
  Inside y = {.U = take(work, x->C * x->D), .R = take(work, x->C * x->C), .Y = take(work, x->C * widest(x)),
              .seen = take(work, x->C * x->D)};
  y.wide = (double *)take(work, wide_elements(x) * (int64_t)(sizeof(double) / sizeof(REAL)));
  return y;
}

static int64_t work_elements(const Inputs *x) {
  int64_t C = x->C, D = x->D, M = x->M;
  return frame_elements(C, D, widest(x)) + 26 * C * D + C * M + 8 * C * C + 2 * C * widest(x) + 2 * D +
         2 * wide_elements(x) + D * (D + TILE_COLUMNS) + 5 * D + 70 * 16;
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
  EACH(t, c) {
    const int64_t at = (first + t * H) * x->G + g;
    const REAL *exits = s->exits + t * D, *v = x->v + at * m, *qk = s->qk + t * c, *kk = s->kk + t * c;
    SIMD EACH(i, D) Y[t * w + i] = end[R == 1 ? 0 : i] * U[t * D + i] + exits[i];
    SIMD EACH(j, m) Y[t * w + D + j] = v[j];
    EACH(u, t) Y[t * w + D + m + u] = 0;
    SIMD for (int64_t u = t; u < c; u++) {
      Y[t * w + D + m + u] += qk[u];
      G[t * c + u] += kk[u];
    }
    G[t * c + t] += x->r2[at];
  }
  wide_product(c, m, D, wide_view(kt, D), wide_view(M0, m), Y + D, w, wide_SUBTRACT, panel);
  int64_t failed = wide_cholesky(G, c, panel);
  wide_solve(G, c, Y, w, w, panel);
  EACH(i, c * D) y->U[i] = (REAL)U[i];
  EACH(i, c * c) y->R[i] = (REAL)G[i];
  EACH(i, c * w) y->Y[i] = (REAL)Y[i];
  y->X = Y, y->P = P0;
  return failed;
}

/* R in place of G, in double if a variance is more than `sure` times its write noise, and then Y too: by one thread. */
static void factor(const Inputs *x, const Shared *s, Inside *y, const REAL *M, const REAL *P, int64_t first, int64_t g) {
  int64_t c = s->F.c, wide = 0;
  REAL *G = y->R;
  y->X = y->P = NULL;
  EACH(t, c) {
    const REAL r2 = x->r2[(first + t * x->H) * x->G + g];
    G[t * c + t] += r2;
    wide |= sizeof(REAL) < sizeof(double) && G[t * c + t] > (REAL)x->sure * r2;
  }
  y->failed = wide ? condition_wide(x, s, y, M, P, first, g) : cholesky(G, c, s->F.panel);
  EACH(t, c) memset(G + t * c, 0, t * sizeof(REAL));
}

/* U, R and Y from the belief at the chunk's start. */
static void condition(const Inputs *x, const Shared *s, Inside *y, const REAL *M, const REAL *P, int64_t first, int64_t g,
                      const Team *team, REAL *panel) {
  int64_t c = s->F.c, D = x->D, m = x->M, H = x->H, R = s->F.R, w = D + m + c;
  const REAL *end = s->F.f + (c - 1) * R;
  REAL *U = y->U, *G = y->R, *Y = y->Y, *E = Y + D, *W = E + m;
  const Range rows = part(team, D, TILE_COLUMNS), columns = part(team, m, TILE_COLUMNS), tokens = part(team, c, 1);
  const int64_t r0 = rows.start, own = rows.end - r0, j0 = columns.start, wide = columns.end - j0;
  if (team->rank == 0) y->width = w;
  product(c, own, D, view(s->kt, D), view(P + r0, D), U + r0, D, SET, panel);
  EACH(t, c) {
    scaled(Y + t * w + r0, end + (R == 1 ? 0 : r0), U + t * D + r0, R, own);
    add(Y + t * w + r0, 1, s->exits + t * D + r0, own);
    memcpy(E + t * w + j0, x->v + ((first + t * H) * x->G + g) * m + j0, wide * sizeof(REAL));
  }
  product(c, wide, D, view(s->kt, D), view(M + j0, m), E + j0, w, SUBTRACT, panel);
  for (int64_t t = tokens.start; t < tokens.end; t++) { /* what noise contributes, before the products */
    memcpy(G + t * c, s->kk + t * c, c * sizeof(REAL));
    memcpy(W + t * w, s->qk + t * c, c * sizeof(REAL));
  }
  meet(team);
  product_upper(team, c, D, view(U, D), transposed(s->kt, D), G, c, 1, 1, panel);
  product_upper(team, c, D, view(U, D), transposed(s->qt, D), W, w, 1, 1, panel);
  meet(team);
  if (team->rank == 0) factor(x, s, y, M, P, first, g);
  meet(team);
  const Range all = part(team, w, TILE_COLUMNS);
  if (!y->X && all.start < all.end) solve(y->R, c, Y + all.start, all.end - all.start, w, panel);
  EACH(t, c) { /* a read sees no later write */
    const int64_t zero = all.start > D + m ? all.start : D + m, last = least(all.end, D + m + t);
    if (zero < last) memset(Y + t * w + zero, 0, (last - zero) * sizeof(REAL));
  }
  meet(team);
}

/* P [n,n] symmetric from its upper triangle; each thread takes every so many-th block of rows. */
static void mirror(REAL *P, int64_t n, const Team *team) {
  for (int64_t i = 16 * team->rank; i < n; i += 16 * team->size)
    for (int64_t j = i; j < n; j += 16)
      for (int64_t r = i; r < least(i + 16, n); r++)
        for (int64_t u = j > r ? j : r + 1; u < least(j + 16, n); u++) P[u * n + r] = P[r * n + u];
}

/* Rows of M = f M and of P = f P f. */
static void fade(REAL *M, REAL *P, const REAL *f, int64_t R, int64_t D, int64_t m, Range rows) {
  for (int64_t i = rows.start; i < rows.end; i++) {
    REAL fi = f[R == 1 ? 0 : i];
    scaled(M + i * m, &fi, M + i * m, 1, m);
    scaled(P + i * D, f, P + i * D, R, D);
    scaled(P + i * D, &fi, P + i * D, 1, D);
  }
}

/* P0 - X'X in double, of a chunk that was conditioned on in double: upper triangle. */
static void exit_wide(const Inputs *x, const Shared *s, const Inside *y, REAL *P) {
  const int64_t c = s->F.c, D = x->D, R = s->F.R, w = y->width;
  const REAL *f = s->F.f + (c - 1) * R;
  EACH(i, D) for (int64_t j = i; j < D; j++) y->P[i * D + j] *= (double)f[R == 1 ? 0 : i] * f[R == 1 ? 0 : j];
  wide_product(D, D, c, wide_transposed(y->X, w), wide_view(y->X, w), y->P, D, wide_SUBTRACT_UPPER, y->X + c * w);
  EACH(i, D) for (int64_t j = i; j < D; j++) P[i * D + j] = (REAL)y->P[i * D + j];
}

/* P = f P f + n, upper triangle: the rows that `product_upper` gives to a thread in each tile of columns. */
static void fade_upper(const Inputs *x, const Shared *s, int faded, REAL *P, const Team *team) {
  const int64_t c = s->F.c, D = x->D, R = s->F.R, half = D / 2;
  const REAL *f = s->F.f + (c - 1) * R, *n = s->n + (c - 1) * R, *across = s->across + (c - 1) * half;
  for (int64_t j = 0; j < D; j += TILE_COLUMNS) {
    const int64_t last = j + least(TILE_COLUMNS, D - j);
    const Range rows = part(team, last, 6);
    for (int64_t i = rows.start; i < rows.end; i++) {
      REAL *to = P + i * D;
      if (!faded) {
        scaled(to + j, f + (R == 1 ? 0 : j), to + j, R, last - j);
        scaled(to + j, f + (R == 1 ? 0 : i), to + j, 1, last - j);
      }
      if (i >= j) to[i] += R == 1 ? n[0] * x->rows[i] : n[i];
      if (s->mixed && i < half && i + half >= j && i + half < last) to[i + half] += across[i];
    }
  }
}

static void exit_chunk(const Inputs *x, const Shared *s, const Inside *y, REAL *M, REAL *P, const Team *team, REAL *panel) {
  int64_t c = s->F.c, D = x->D, m = x->M, R = s->F.R, w = y->width;
  const REAL *f = s->F.f + (c - 1) * R;
  const Range columns = part(team, m, TILE_COLUMNS);
  const int64_t j0 = columns.start, wide = columns.end - j0;
  EACH(i, D) scaled(M + i * m + j0, f + (R == 1 ? 0 : i), M + i * m + j0, 1, wide);
  product(D, wide, c, transposed(y->Y, w), view(y->Y + D + j0, w), M + j0, m, ADD, panel);
  if (x->rotates) turn_memory(&s->F, M + j0, wide, m, 1);
  if (y->X) {
    if (team->rank == 0) exit_wide(x, s, y, P);
    meet(team);
  }
  fade_upper(x, s, y->X != NULL, P, team);
  if (!y->X) product_upper(team, D, c, transposed(y->Y, w), view(y->Y, w), P, D, -1, 1, panel);
  meet(team);
  mirror(P, D, team);
  meet(team);
  if (x->rotates) {
    if (team->rank == 0) {
      turn_covariance(&s->F, P, 1);
      mirror(P, D, &ALONE); /* symmetric to the last bit */
    }
    meet(team);
  }
}

/* What is read of the belief at the chunk's start: before its end replaces it. */
static void look(const Inputs *x, const Outputs *o, const Shared *s, const Inside *y, const REAL *M, const REAL *P,
                 int64_t first, int64_t g, const Team *team, REAL *panel) {
  const int64_t c = s->F.c, D = x->D, m = x->M, step = x->H * x->G, at = first * x->G + g;
  const Range columns = part(team, m, TILE_COLUMNS), rows = part(team, D, TILE_COLUMNS);
  const int64_t j0 = columns.start, r0 = rows.start;
  product(c, columns.end - j0, D, view(s->qt, D), view(M + j0, m), o->o + at * m + j0, step * m, SET, panel);
  if (o->variance) product(c, rows.end - r0, D, view(s->qt, D), view(P + r0, D), y->seen + r0, D, SET, panel);
}

static void outputs(const Inputs *x, const Outputs *o, const Shared *s, const Inside *y, int64_t first, int64_t g,
                    const Team *team, REAL *panel, REAL *work) {
  int64_t c = s->F.c, D = x->D, m = x->M, w = y->width, step = x->H * x->G, at = first * x->G + g;
  const REAL *W = y->Y + D + m;
  const Range columns = part(team, m, TILE_COLUMNS), tokens = part(team, c, 1);
  const int64_t j0 = columns.start;
  product(c, columns.end - j0, c, transposed(W, w), view(y->Y + D + j0, w), o->o + at * m + j0, step * m, ADD, panel);
  for (int64_t t = tokens.start; t < tokens.end; t++) {
    REAL pivot = y->R[t * c + t];
    o->b[at + t * step] = t == y->failed ? -1 : 1 / (pivot * pivot);
    if (o->squares) o->squares[at + t * step] = dot(y->Y + t * w + D, y->Y + t * w + D, m);
    if (!o->variance) continue;
    REAL total = dot(y->seen + t * D, s->qt + t * D, D);
    noisy_row(s, x->rows, t, work, s->q + t * D);
    total += dot(work, s->q + t * D, D);
    EACH(u, t + 1) total -= W[u * w + t] * W[u * w + t];
    o->variance[at + t * step] = total;
  }
}

/* Numbers that a thread has a part of, copied. */
INLINE void save(REAL *to, const REAL *from, int64_t n, const Team *team) {
  const Range all = part(team, n, CACHE_LINE);
  memcpy(to + all.start, from + all.start, (all.end - all.start) * sizeof(REAL));
}

static void forward_head(const Inputs *x, const Outputs *o, int64_t head, const Team *team, REAL *work) {
  int64_t T = x->T, H = x->H, G = x->G, D = x->D, m = x->M, C = x->C, K = (T + C - 1) / C;
  Shared mine = shared_room(x, &work), *all[TEAM_MOST] = {&mine};
  Inside own = inside_room(x, &work), *y = &own;
  if (team->size > 1) {
    struct { Shared *s; Inside *y; } here = {&mine, &own}, *there;
    team->place->rooms[team->rank] = &here;
    meet(team);
    EACH(r, team->size) there = team->place->rooms[r], all[r] = there->s;
    there = team->place->rooms[0], y = there->y;
    meet(team);
  }
  EACH(i, K + 1) {
    const int64_t first_of_head = (head / H) * T * H + head % H, next = i + team->rank, first = first_of_head + i * C * H;
    if (i % team->size == 0) {
      if (next < K) share(x, &mine, first_of_head + next * C * H, least(C, T - next * C));
      meet(team);
    }
    const Shared *s = all[i % team->size];
    EACH(g, G) {
      int64_t n = head * G + g, slot = n * (K + 1) + i;
      REAL *M = o->M + n * D * m, *P = o->P + n * D * D;
      if (o->saved_M) {
        save(o->saved_M + slot * D * m, M, D * m, team);
        save(o->saved_P + slot * D * D, P, D * D, team);
      }
      if (i == K) {
        if (team->rank == 0 && indefinite(P, D, work)) lost(x, o, head, g);
        continue;
      }
      look(x, o, s, y, M, P, first, g, team, mine.F.panel);
      condition(x, s, y, M, P, first, g, team, mine.F.panel);
      outputs(x, o, s, y, first, g, team, mine.F.panel, work);
      exit_chunk(x, s, y, M, P, team, mine.F.panel);
    }
  }
}

/* How many threads may share a head. */
static int64_t team_of(const Inputs *x) {
  return worth(x->T * x->D * (x->D + x->M), (x->D + TILE_COLUMNS - 1) / TILE_COLUMNS);
}

ENTRY(forward, Inputs, x, Outputs, o) {
  OVER_TEAMS(work_elements(x), team_of(x), forward_head(x, o, head, team, work))
}

#include "kalman_chunk_back.h"
