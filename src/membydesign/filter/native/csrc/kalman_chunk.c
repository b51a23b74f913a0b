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

static const Team ALONE = {0, 1, NULL};

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
  int in_double;    /* whether this chunk is conditioned on in double */
  double *wide;     /* room for the same in double */
  double *X, *P;    /* of that, X as columns of Y and P0, if this chunk is; else NULL */
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
static void condition_wide(const Inputs *x, const Shared *s, Inside *y, const REAL *M, const REAL *P, int64_t first,
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
  y->failed = wide_cholesky(G, c, panel);
  wide_solve(G, c, Y, w, w, panel);
  EACH(i, c * D) y->U[i] = (REAL)U[i];
  EACH(i, c * c) y->R[i] = (REAL)G[i];
  EACH(i, c * w) y->Y[i] = (REAL)Y[i];
  EACH(t, c) {
    memset(y->R + t * c, 0, t * sizeof(REAL));
    memset(y->Y + t * w + D + m, 0, t * sizeof(REAL)); /* a read sees no later write */
  }
  y->X = Y, y->P = P0;
}

/* `product` into the upper triangle of C [n,n], by the whole team: of each tile of columns, every thread has some rows. */
static void product_upper(const Team *team, int64_t n, int64_t k, View A, View B, REAL *C, int64_t ld, REAL sign, int added,
                          REAL *panel) {
  for (int64_t j = 0; j < n; j += TILE_COLUMNS) {
    const int64_t columns = least(TILE_COLUMNS, n - j);
    const Range rows = part(team, j + columns, 6);
    if (rows.start < rows.end)
      product(rows.end - rows.start, columns, k, (View){A.at + rows.start * A.row, A.row, A.column},
              (View){B.at + j * B.column, B.row, B.column}, C + rows.start * ld + j, ld, (Into){sign, added, 0}, panel);
  }
}

/* R in place of G, unless a variance is more than `sure` times its write noise: by one thread. */
static void factor(const Inputs *x, Inside *y, int64_t c, int64_t first, int64_t g, REAL *panel) {
  REAL *G = y->R;
  y->X = y->P = NULL, y->in_double = 0;
  EACH(t, c) {
    const REAL r2 = x->r2[(first + t * x->H) * x->G + g];
    G[t * c + t] += r2;
    y->in_double |= sizeof(REAL) < sizeof(double) && G[t * c + t] > (REAL)x->sure * r2;
  }
  if (y->in_double) return;
  y->failed = cholesky(G, c, panel);
  EACH(t, c) memset(G + t * c, 0, t * sizeof(REAL));
}

/* What is read of the belief at the chunk's start, and the products of W, while the first thread also has the
 * factorisation to do: it takes one tile of columns less than its share. */
static void look(const Inputs *x, const Outputs *o, const Shared *s, const Inside *y, const REAL *M, const REAL *P,
                 int64_t first, int64_t g, const Team *team, REAL *panel) {
  const int64_t c = s->F.c, D = x->D, m = x->M, w = D + m + c, step = x->H * x->G, at = first * x->G + g, size = team->size;
  const int64_t tiles = (m + TILE_COLUMNS - 1) / TILE_COLUMNS, spared = size > 1 && tiles >= size;
  const int64_t less = size > 1 ? (tiles / size - spared) * TILE_COLUMNS : 0; /* columns of the first thread */
  Range columns = {0, size > 1 ? less : m}, rows = part(team, D, TILE_COLUMNS);
  if (team->rank) {
    columns = part_of(m - less, TILE_COLUMNS, team->rank - 1, size - 1);
    columns.start += less, columns.end += less;
  }
  if (o) {
    product(c, columns.end - columns.start, D, view(s->qt, D), view(M + columns.start, m), o->o + at * m + columns.start,
            step * m, SET, panel);
    if (o->variance)
      product(c, rows.end - rows.start, D, view(s->qt, D), view(P + rows.start, D), y->seen + rows.start, D, SET, panel);
  }
  if (team->rank == size - 1) {
    REAL *W = y->Y + D + m;
    EACH(t, c) memcpy(W + t * w, s->qk + t * c, c * sizeof(REAL));
    product(c, c, D, view(y->U, D), transposed(s->qt, D), W, w, (Into){1, 1, 1}, panel);
  }
}

/* Columns of Y = R'^-1 Y. */
static void solve_part(const Inside *y, int64_t c, int64_t from, Range columns, REAL *panel) {
  if (columns.start < columns.end)
    solve(y->R, c, y->Y + from + columns.start, columns.end - columns.start, y->width, panel);
}

/* U, R and Y from the belief at the chunk's start; and, for outputs o, what is read of that belief. */
static void condition(const Inputs *x, const Outputs *o, const Shared *s, Inside *y, const REAL *M, const REAL *P,
                      int64_t first, int64_t g, const Team *team, REAL *panel) {
  int64_t c = s->F.c, D = x->D, m = x->M, H = x->H, R = s->F.R, w = D + m + c;
  const REAL *end = s->F.f + (c - 1) * R;
  REAL *U = y->U, *G = y->R, *Y = y->Y, *E = Y + D, *W = E + m;
  const Range rows = part(team, D, TILE_COLUMNS), columns = part(team, m, TILE_COLUMNS), tokens = part(team, c, 1);
  const Range reads = part(team, c, LANES);
  const int64_t r0 = rows.start, nr = rows.end - r0, j0 = columns.start, nj = columns.end - j0;
  if (team->rank == 0) y->width = w;
  product(c, nr, D, view(s->kt, D), view(P + r0, D), U + r0, D, SET, panel);
  EACH(t, c) {
    scaled(Y + t * w + r0, end + (R == 1 ? 0 : r0), U + t * D + r0, R, nr);
    add(Y + t * w + r0, 1, s->exits + t * D + r0, nr);
    memcpy(E + t * w + j0, x->v + ((first + t * H) * x->G + g) * m + j0, nj * sizeof(REAL));
  }
  product(c, nj, D, view(s->kt, D), view(M + j0, m), E + j0, w, SUBTRACT, panel);
  for (int64_t t = tokens.start; t < tokens.end; t++) memcpy(G + t * c, s->kk + t * c, c * sizeof(REAL));
  meet(team);
  product_upper(team, c, D, view(U, D), transposed(s->kt, D), G, c, 1, 1, panel);
  meet(team);
  if (team->rank == 0) factor(x, y, c, first, g, panel);
  look(x, o, s, y, M, P, first, g, team, panel);
  meet(team);
  if (y->in_double) {
    if (team->rank == 0) condition_wide(x, s, y, M, P, first, g);
  } else {
    solve_part(y, c, 0, rows, panel);
    solve_part(y, c, D, columns, panel);
    solve_part(y, c, D + m, reads, panel);
  }
  for (int64_t t = reads.start + 1; t < c; t++) /* a read sees no later write */
    if (!y->in_double) memset(W + t * w + reads.start, 0, (least(t, reads.end) - reads.start) * sizeof(REAL));
  meet(team);
}

/* P [n,n] symmetric from its upper triangle. */
static void mirror(REAL *P, int64_t n) {
  for (int64_t i = 0; i < n; i += 16)
    for (int64_t j = i; j < n; j += 16)
      for (int64_t r = i; r < least(i + 16, n); r++)
        for (int64_t u = j > r ? j : r + 1; u < least(j + 16, n); u++) P[u * n + r] = P[r * n + u];
}

/* Columns of rows of P [D,D] = f P f: the same number above and below the diagonal. */
static void fade(REAL *P, const REAL *f, int64_t R, int64_t D, Range rows, Range columns) {
  const int64_t j = columns.start, n = columns.end - j;
  for (int64_t i = rows.start; i < rows.end; i++) {
    const REAL fi = f[R == 1 ? 0 : i];
    const REAL *restrict fj = f + (R == 1 ? 0 : j);
    REAL *restrict p = P + i * D + j;
    if (R == 1) SIMD EACH(u, n) p[u] *= fi * fj[0];
    else SIMD EACH(u, n) p[u] *= fi * fj[u];
  }
}

/* Process noise enters columns of P. */
static void add_noise(const Inputs *x, const Shared *s, REAL *P, Range columns) {
  const int64_t c = s->F.c, D = x->D, R = s->F.R, half = D / 2;
  const REAL *n = s->n + (c - 1) * R, *across = s->across + (c - 1) * half;
  for (int64_t i = columns.start; i < columns.end; i++) {
    P[i * D + i] += R == 1 ? n[0] * x->rows[i] : n[i];
    if (s->mixed) P[(i < half ? i + half : i - half) * D + i] += across[i < half ? i : i - half];
  }
}

/* P0 - X'X in double, of a chunk that was conditioned on in double. */
static void exit_wide(const Inputs *x, const Shared *s, const Inside *y, REAL *P) {
  const int64_t c = s->F.c, D = x->D, R = s->F.R, w = y->width;
  const REAL *f = s->F.f + (c - 1) * R;
  EACH(i, D) for (int64_t j = i; j < D; j++) y->P[i * D + j] *= (double)f[R == 1 ? 0 : i] * f[R == 1 ? 0 : j];
  wide_product(D, D, c, wide_transposed(y->X, w), wide_view(y->X, w), y->P, D, wide_SUBTRACT_UPPER, y->X + c * w);
  EACH(i, D) for (int64_t j = i; j < D; j++) P[i * D + j] = (REAL)y->P[i * D + j];
  mirror(P, D);
  add_noise(x, s, P, (Range){0, D});
}

/* The belief at the chunk's end. Threads of a team have all rows of some columns of P, which costs them the products
 * below the diagonal and spares them an exchange; one thread computes the upper triangle alone. */
static void exit_chunk(const Inputs *x, const Shared *s, const Inside *y, REAL *M, REAL *P, const Team *team, REAL *panel) {
  int64_t c = s->F.c, D = x->D, m = x->M, R = s->F.R, w = y->width;
  const REAL *f = s->F.f + (c - 1) * R;
  const Range columns = part(team, m, TILE_COLUMNS), rows = part(team, D, TILE_COLUMNS), all = {0, D};
  const int64_t j0 = columns.start, nj = columns.end - j0, r0 = rows.start;
  EACH(i, D) scaled(M + i * m + j0, f + (R == 1 ? 0 : i), M + i * m + j0, 1, nj);
  product(D, nj, c, transposed(y->Y, w), view(y->Y + D + j0, w), M + j0, m, ADD, panel);
  if (x->rotates) turn_memory(&s->F, M + j0, nj, m, 1);
  if (y->X) {
    if (team->rank == 0) exit_wide(x, s, y, P);
  } else {
    fade(P, f, R, D, all, rows);
    add_noise(x, s, P, rows);
    product(D, rows.end - r0, c, transposed(y->Y, w), view(y->Y + r0, w), P + r0, D, team->size == 1 ? SUBTRACT_UPPER : SUBTRACT,
            panel);
    if (team->size == 1) mirror(P, D);
  }
  if (y->X || x->rotates) meet(team);
  if (!x->rotates) return;
  if (team->rank == 0) {
    turn_covariance(&s->F, P, 1);
    mirror(P, D); /* symmetric to the last bit */
  }
  meet(team);
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

/* A thread's columns of a matrix [D,n], copied. */
INLINE void save(REAL *to, const REAL *from, int64_t D, int64_t n, const Team *team) {
  const Range columns = part(team, n, TILE_COLUMNS);
  const int64_t j = columns.start;
  EACH(i, D) memcpy(to + i * n + j, from + i * n + j, (columns.end - j) * sizeof(REAL));
}

/* What a thread of a team has of a chunk in forward. */
typedef struct {
  Shared s;
  Inside y;
} Room;

static void forward_head(const Inputs *x, const Outputs *o, int64_t head, const Team *team, REAL *work) {
  int64_t T = x->T, H = x->H, G = x->G, D = x->D, m = x->M, C = x->C, K = (T + C - 1) / C, turn = 0;
  Room mine = {.s = shared_room(x, &work)}, *rooms[TEAM_MOST] = {&mine, &mine};
  mine.y = inside_room(x, &work);
  REAL *panel = mine.s.F.panel;
  team_rooms(team, &mine, (void **)rooms);
  const int64_t first_of_head = (head / H) * T * H + head % H;
  EACH(i, K + 1) {
    const int64_t next = i + team->rank, first = first_of_head + i * C * H;
    if (i % team->size == 0) {
      meet(team); /* when nobody reads the last chunks any more */
      if (next < K) share(x, &mine.s, first_of_head + next * C * H, least(C, T - next * C));
      meet(team);
    }
    const Shared *s = &rooms[i % team->size]->s;
    EACH(g, G) {
      int64_t n = head * G + g, slot = n * (K + 1) + i;
      REAL *M = o->M + n * D * m, *P = o->P + n * D * D;
      if (o->saved_M) {
        save(o->saved_M + slot * D * m, M, D, m, team);
        save(o->saved_P + slot * D * D, P, D, D, team);
      }
      if (i < K) {
        Inside *y = &rooms[turn++ % 2]->y; /* in turn, since other threads may still read the last one */
        condition(x, o, s, y, M, P, first, g, team, panel);
        outputs(x, o, s, y, first, g, team, panel, work);
        exit_chunk(x, s, y, M, P, team, panel);
      }
    }
  }
  meet(team);
  EACH(g, team->rank == 0 ? G : 0)
    if (indefinite(o->P + (head * G + g) * D * D, D, work)) lost(x, o, head, g);
}

/* How many threads may share a head. */
static int64_t team_of(const Inputs *x) {
  return worth(x->T * x->D * (x->D + x->M), (x->D + TILE_COLUMNS - 1) / TILE_COLUMNS);
}

ENTRY(forward, Inputs, x, Outputs, o) {
  OVER_TEAMS(work_elements(x), team_of(x), forward_head(x, o, head, team, work))
}

#include "kalman_chunk_back.h"
