/* The mean, chunk by chunk, once the gains are known: the formulas and letters of filter/torch/mean_pass.py, in C.
 *
 * For a chunk that starts from M0, with d the directions of writes, g their strengths, and an upper triangle's row the
 * earlier token:
 *
 *     E_t = V_t - kt_t' M0 - sum_{s<t} kd_st Y_s,   Y_s = g_s E_s          (an additive write corrects no error: E = V)
 *     o_t = qt_t' M0 + sum_{s<=t} qd_st Y_s,        M = fC M0 + exits' Y
 *
 * Heads run in parallel. Forward saves the mean at every chunk's start (and at the end); backward computes the inside of
 * a chunk anew. Where there are fewer heads than threads, forward splits value columns between them, and backward walks
 * as many chunks at once: in each, one thread does what belongs to the chunk, and all carry dM through, each its columns.
 */
#include "frame.h"
#include "layout.h"
#include "team.h"

#define INPUTS(X)                                                                   \
  X(INT, T) X(INT, H)                                                               \
  X(INT, S)             /* strengths of a token, each for M/S value columns */      \
  X(INT, D) X(INT, M)                                                               \
  X(INT, R)             /* decays of a token: 1 for all rows, D, or D/2 for pairs */ \
  X(INT, rotates)       /* whether drift turns pairs of rows */                     \
  X(INT, C)             /* tokens of a chunk, or between two saved means */         \
  X(INT, by_token)      /* forward token by token (not for pairs), or chunk by chunk */ \
  X(INT, back_by_token) /* the same for backward */                                 \
  X(INT, by_group)      /* forward token by token: a few of them in each pass */    \
  X(READ, q)            /* [B,T,H,D] */                                             \
  X(READ_OR_NULL, k)    /* [B,T,H,D], or NULL for additive writes */                \
  X(READ, v)            /* [B,T,H,M] */                                             \
  X(READ, d)            /* [B,T,H,D] */                                             \
  X(READ, strength)     /* [B,T,H,S] */                                             \
  X(READ, a)            /* [B,T,H,R] */                                             \
  X(READ_OR_NULL, cos)  /* of each turn, [B,T,H,D/2] */                             \
  X(READ_OR_NULL, sin)
STRUCT(Inputs, INPUTS)

#define OUTPUTS(X)                                                                  \
  X(WRITE, M)             /* in: mean at the start, out: at the end; [B,H,D,M] */   \
  X(WRITE, o)             /* [B,T,H,M] */                                           \
  X(WRITE_OR_NULL, e)     /* [B,T,H,M] */                                           \
  X(WRITE_OR_NULL, saved) /* means before tokens 0, C, … and at the end: [B,H,K+1,D,M] */
STRUCT(Outputs, OUTPUTS)

#define GRADIENTS(X)                                                                \
  X(READ, saved)                                                                    \
  X(READ, o) X(READ_OR_NULL, e) /* of the outputs */                                \
  X(WRITE, M)                   /* in: gradient of the mean at the end, out: at the start */ \
  X(WRITE, q) X(WRITE, v) X(WRITE, d) X(WRITE, strength) X(WRITE, log_a) /* of the inputs, zero at first */ \
  X(WRITE_OR_NULL, k) X(WRITE_OR_NULL, angle)                            /* likewise, if there are such inputs */
STRUCT(Gradients, GRADIENTS)

#include "mean_token.h"
#include "mean_group.h"
#include "mean_token_back.h"

typedef struct {
  Frame F;
  REAL *q, *k, *d, *qt, *kt, *exits;  /* [c,D] */
  REAL *qd, *kd;                      /* [c,c] */
  REAL *g, *E, *Y;                    /* [c,M] */
} Chunk;

static int64_t widest(const Inputs *x) {
  int64_t w = x->D > x->M ? x->D : x->M;
  return w > x->C ? w : x->C;
}

static int64_t work_elements(const Inputs *x) {
  int64_t C = x->C, D = x->D, M = x->M;
  return frame_elements(C, D, widest(x)) + 15 * C * D + 6 * C * M + 4 * C * C + D + 40 * 16;
}

static Chunk chunk_room(const Inputs *x, REAL **work) {
  int64_t C = x->C, D = x->D;
  Chunk y = {.F = frame_room(C, D, x->R, (int)x->rotates, widest(x), work)};
  REAL **rows[] = {&y.q, &y.k, &y.d, &y.qt, &y.kt, &y.exits}, **columns[] = {&y.g, &y.E, &y.Y};
  EACH(i, 6) *rows[i] = take(work, C * D);
  EACH(i, 3) *columns[i] = take(work, C * x->M);
  y.qd = take(work, C * C), y.kd = take(work, C * C);
  return y;
}

#define STEP (STRIP * LANES)

/* Errors and writes of a chunk: rows of E hold V - Kt M0 at first. */
static void correct(const Chunk *y, int64_t m) {
  int64_t c = y->F.c;
  for (int64_t start = 0; start < c; start += SOLVED) {
    int64_t end = least(start + SOLVED, c);
    if (start)
      product(end - start, m, start, transposed(y->kd + start, c), view(y->Y, m), y->E + start * m, m, SUBTRACT,
              y->F.panel);
    for (int64_t j = 0; j < m; j += STEP)
      for (int64_t t = start; t < end; t++) {
        REAL *E = y->E + t * m + j, *Y = y->Y + t * m + j;
        const REAL *g = y->g + t * m + j;
        int64_t columns = least(STEP, m - j);
        if (columns == STEP) {
          vec x[STRIP];
          _Pragma("GCC unroll 4") EACH(h, STRIP) x[h] = ((vec *)E)[h];
          for (int64_t s = start; s < t; s++) {
            const REAL w = y->kd[s * c + t];
            _Pragma("GCC unroll 4") EACH(h, STRIP) x[h] -= w * ((const vec *)(y->Y + s * m + j))[h];
          }
          _Pragma("GCC unroll 4") EACH(h, STRIP) {
            ((vec *)E)[h] = x[h];
            ((vec *)Y)[h] = x[h] * ((const vec *)g)[h];
          }
        } else {
          for (int64_t s = start; s < t; s++) add(E, -y->kd[s * c + t], y->Y + s * m + j, columns);
          EACH(i, columns) Y[i] = g[i] * E[i];
        }
      }
  }
}

/* The adjoint for n of m columns: dY holds the gradient of the writes at first; dE that of the errors, and on return of
 * V - Kt M0. */
static void correct_back(const Chunk *y, REAL *dY, REAL *dE, int64_t n, int64_t m, int corrects, const REAL *strengths,
                         REAL *panel) {
  int64_t c = y->F.c;
  for (int64_t start = (c - 1) / SOLVED * SOLVED; start >= 0; start -= SOLVED) {
    int64_t end = least(start + SOLVED, c);
    if (corrects && end < c)
      product(end - start, n, c - end, view(y->kd + start * c + end, c), view(dE + end * m, m), dY + start * m, m,
              SUBTRACT, panel);
    for (int64_t t = end - 1; t >= start; t--) {
      REAL *restrict d = dE + t * m, *restrict w = dY + t * m;
      for (int64_t u = t + 1; u < end && corrects; u++) add(w, -y->kd[t * c + u], dE + u * m, n);
      const REAL *restrict g = strengths + t * m;
      SIMD EACH(j, n) d[j] += g[j] * w[j];
    }
  }
}

/* Tokens of a chunk from the mean at its start; `first` is the first token's index in [B,T,H]. */
static void inside(const Inputs *x, Chunk *y, const REAL *M, int64_t first, int64_t c) {
  int64_t D = x->D, m = x->M, H = x->H, half = D / 2, R = y->F.R, each = m / x->S;
  Frame *F = &y->F;
  frame_of(F, c, x->a + first * x->R, x->cos ? x->cos + first * half : NULL, x->sin ? x->sin + first * half : NULL, x->R, H);
  enter(F, y->q, x->q + first * D, H * D);
  enter(F, y->d, x->d + first * D, H * D);
  if (x->k) enter(F, y->k, x->k + first * D, H * D);
  EACH(t, c) {
    const REAL *strength = x->strength + (first + t * H) * x->S;
    scaled(y->qt + t * D, F->f + t * R, y->q + t * D, R, D);
    if (x->k) scaled(y->kt + t * D, F->f + t * R, y->k + t * D, R, D);
    EACH(i, x->S) EACH(j, each) y->g[t * m + i * each + j] = strength[i];
    memcpy(y->E + t * m, x->v + (first + t * H) * m, m * sizeof(REAL));
  }
  decayed_products(F, y->q, x->k ? y->k : NULL, y->d, y->qd, y->kd, y->exits);
  if (x->k) {
    product(c, m, D, view(y->kt, D), view(M, m), y->E, m, SUBTRACT, F->panel);
    correct(y, m);
  } else {
    SIMD EACH(i, c * m) y->Y[i] = y->g[i] * y->E[i];
  }
}

/* n of m columns of M fade. */
static void fade(REAL *M, const REAL *f, int64_t R, int64_t D, int64_t n, int64_t m) {
  EACH(i, D) scaled(M + i * m, f + (R == 1 ? 0 : i), M + i * m, 1, n);
}

static void forward_head(const Inputs *x, const Outputs *o, int64_t head, REAL *work) {
  int64_t T = x->T, H = x->H, D = x->D, m = x->M, C = x->C, K = (T + C - 1) / C;
  Chunk y = chunk_room(x, &work);
  REAL *M = o->M + head * D * m, *panel = y.F.panel;
  EACH(i, K + 1) {
    int64_t start = i * C, c = least(C, T - start), first = ((head / H) * T + start) * H + head % H;
    if (o->saved) memcpy(o->saved + (head * (K + 1) + i) * D * m, M, D * m * sizeof(REAL));
    if (i == K) break;
    inside(x, &y, M, first, c);
    product(c, m, D, view(y.qt, D), view(M, m), o->o + first * m, H * m, SET, panel);
    product(c, m, c, transposed(y.qd, c), view(y.Y, m), o->o + first * m, H * m, ADD, panel);
    EACH(t, o->e ? c : 0) memcpy(o->e + (first + t * H) * m, y.E + t * m, m * sizeof(REAL));
    fade(M, y.F.f + (c - 1) * y.F.R, y.F.R, D, m, m);
    product(D, m, c, transposed(y.exits, D), view(y.Y, m), M, m, ADD, panel);
    if (x->rotates) turn_memory(&y.F, M, m, m, 1);
  }
}

/* Gradients inside a chunk. */
typedef struct {
  REAL *q, *k, *d, *qt, *kt, *exits, *net, *angle;  /* [c,D] */
  REAL *o, *Y, *E;                                  /* [c,M] */
  REAL *qd, *kd, *end;                              /* [c,c], [c,c], [D] */
} ChunkBack;

static ChunkBack chunk_back_room(const Inputs *x, REAL **work) {
  int64_t C = x->C, D = x->D;
  ChunkBack d;
  REAL **rows[] = {&d.q, &d.k, &d.net, &d.angle, &d.d, &d.qt, &d.kt, &d.exits}, **columns[] = {&d.o, &d.Y, &d.E};
  EACH(i, 8) *rows[i] = take(work, C * D);
  EACH(i, 3) *columns[i] = take(work, C * x->M);
  d.qd = take(work, C * C), d.kd = take(work, C * C), d.end = take(work, D);
  return d;
}

/* What a thread has of a chunk in backward, and others may read. */
typedef struct {
  Chunk y;
  ChunkBack d;
  REAL *dM; /* [D,M]: the gradient of the mean at the chunk's end, if threads share the head */
} BackRoom;

/* A chunk anew, and all gradients inside it that do not depend on that of the mean at its end. */
static void before_walk(const Inputs *x, const Gradients *o, Chunk *y, ChunkBack *d, const REAL *M, int64_t first, int64_t c) {
  int64_t D = x->D, m = x->M, H = x->H;
  REAL *panel = y->F.panel;
  inside(x, y, M, first, c);
  memset(d->q, 0, (d->d - d->q) * sizeof(REAL)); /* q, k, net and angle, in one piece */
  memset(d->end, 0, D * sizeof(REAL));
  EACH(t, c) {
    memcpy(d->o + t * m, o->o + (first + t * H) * m, m * sizeof(REAL));
    if (o->e) memcpy(d->E + t * m, o->e + (first + t * H) * m, m * sizeof(REAL));
    else memset(d->E + t * m, 0, m * sizeof(REAL));
  }
  product(c, m, c, view(y->qd, c), view(d->o, m), d->Y, m, SET, panel);
  product(c, c, m, view(y->Y, m), transposed(d->o, m), d->qd, c, SET_UPPER, panel);
  EACH(s, c) memset(d->qd + s * c, 0, s * sizeof(REAL));
  product(c, D, m, view(d->o, m), transposed(M, m), d->qt, D, SET, panel);
}

/* What the gradient dM of the mean at a chunk's end says of the chunk; dM is turned back on the way. */
static void at_end(const Inputs *x, const Chunk *y, ChunkBack *d, const REAL *M, REAL *dM) {
  int64_t c = y->F.c, D = x->D, m = x->M, R = y->F.R;
  const REAL *f = y->F.f + (c - 1) * R;
  if (x->rotates) {
    turn_angle(&y->F, d->angle + (c - 1) * (D / 2), 1, M + D * m, dM, m);
    turn_memory(&y->F, dM, m, m, -1);
  }
  product(c, D, m, view(y->Y, m), transposed(dM, m), d->exits, D, SET, y->F.panel);
  EACH(i, D) d->end[R == 1 ? 0 : i] += f[R == 1 ? 0 : i] * dot(dM + i * m, M + i * m, m);
}

/* Columns of dM, turned back, from a chunk's end to its start, and of the writes and errors on the way. */
static void walk_columns(const Inputs *x, const Chunk *y, ChunkBack *d, REAL *dM, Range columns, REAL *panel) {
  int64_t c = y->F.c, D = x->D, m = x->M, R = y->F.R, j = columns.start, n = columns.end - columns.start;
  product(c, n, D, view(y->exits, D), view(dM + j, m), d->Y + j, m, ADD, panel);
  correct_back(y, d->Y + j, d->E + j, n, m, x->k != NULL, y->g + j, panel);
  fade(dM + j, y->F.f + (c - 1) * R, R, D, n, m);
  product(D, n, c, transposed(y->qt, D), view(d->o + j, m), dM + j, m, ADD, panel);
  if (x->k) product(D, n, c, transposed(y->kt, D), view(d->E + j, m), dM + j, m, SUBTRACT, panel);
}

/* All other gradients of the inputs. */
static void after_walk(const Inputs *x, const Gradients *o, const Chunk *y, ChunkBack *d, const REAL *M, int64_t first) {
  int64_t c = y->F.c, D = x->D, m = x->M, H = x->H, half = D / 2, R = y->F.R, each = m / x->S;
  REAL *panel = y->F.panel;
  EACH(t, c) {
    REAL *strength = o->strength + (first + t * H) * x->S;
    EACH(i, x->S) strength[i] = dot(y->E + t * m + i * each, d->Y + t * m + i * each, each);
    memcpy(o->v + (first + t * H) * m, d->E + t * m, m * sizeof(REAL));
  }
  if (x->k) {
    product(c, c, m, view(y->Y, m), transposed(d->E, m), d->kd, c, (Into){-1, 0, 1}, panel);
    EACH(s, c) memset(d->kd + s * c, 0, (s + 1) * sizeof(REAL));
    product(c, D, m, view(d->E, m), transposed(M, m), d->kt, D, (Into){-1, 0, 0}, panel);
  }
  decayed_products_back(&y->F, y->q, x->k ? y->k : NULL, y->d, y->qd, y->kd, y->exits, d->qd, d->kd, d->exits, d->q, d->k,
                        d->d, d->net, d->end);
  EACH(t, c) {
    const REAL *f = y->F.f + t * R;
    gather(d->net + t * R, 1, y->qt + t * D, d->qt + t * D, R, D);
    scaled(d->qt + t * D, f, d->qt + t * D, R, D);
    if (!x->k) continue;
    gather(d->net + t * R, 1, y->kt + t * D, d->kt + t * D, R, D);
    scaled(d->kt + t * D, f, d->kt + t * D, R, D);
  }
  add(d->q, 1, d->qt, c * D);
  enter_back(&y->F, y->q, d->q, o->q + first * D, H * D, d->angle);
  enter_back(&y->F, y->d, d->d, o->d + first * D, H * D, d->angle);
  if (x->k) {
    add(d->k, 1, d->kt, c * D);
    enter_back(&y->F, y->k, d->k, o->k + first * D, H * D, d->angle);
  }
  drift_back(&y->F, d->net, d->end, d->angle, o->log_a + first * x->R, x->rotates ? o->angle + first * half : NULL, x->R, H);
}

static void backward_head(const Inputs *x, const Gradients *o, int64_t head, const Team *team, REAL *work) {
  int64_t T = x->T, H = x->H, D = x->D, m = x->M, C = x->C, K = (T + C - 1) / C;
  BackRoom mine = {.y = chunk_room(x, &work)}, *rooms[TEAM_MOST] = {&mine};
  mine.d = chunk_back_room(x, &work), mine.dM = take(&work, D * m);
  REAL *dM = o->M + head * D * m;
  const Range columns = part(team, m, TILE_COLUMNS);
  team_rooms(team, &mine, (void **)rooms);
  for (int64_t last = K - 1; last >= 0; last -= team->size) { /* chunks last, last - 1, …: one for each thread */
    const int64_t i = last - team->rank, first = ((head / H) * T + i * C) * H + head % H;
    const REAL *M = o->saved + (head * (K + 1) + i) * D * m;
    if (i >= 0) before_walk(x, o, &mine.y, &mine.d, M, first, least(C, T - i * C));
    if (team->size == 1) {
      at_end(x, &mine.y, &mine.d, M, dM);
      walk_columns(x, &mine.y, &mine.d, dM, columns, mine.y.F.panel);
    } else {
      meet(team);
      EACH(r, least(team->size, last + 1)) {
        BackRoom *room = rooms[r];
        const int64_t j = columns.start, n = columns.end - j;
        EACH(l, D) memcpy(room->dM + l * m + j, dM + l * m + j, n * sizeof(REAL));
        if (x->rotates) turn_memory(&room->y.F, dM + j, n, m, -1);
        walk_columns(x, &room->y, &room->d, dM, columns, mine.y.F.panel);
      }
      meet(team);
      if (i >= 0) at_end(x, &mine.y, &mine.d, M, mine.dM);
    }
    if (i >= 0) after_walk(x, o, &mine.y, &mine.d, M, first);
  }
}

ENTRY(forward, Inputs, x, Outputs, o) {
  if (x->by_token && x->by_group) {
    const Strips s = group_strips(x);
    OVER_PARTS(group_work(x), s.count, worth(x->T * x->D * x->M, s.count),
               group_forward(x, o, head, start, end, work))
  }
  if (x->by_token) {
    const Strips s = strips_of(x);
    OVER_PARTS(token_elements(x), s.count, worth(x->T * x->D * x->M, s.count),
               token_forward(x, o, head, start, end, work))
  }
  OVER_HEADS(work_elements(x), forward_head(x, o, head, work))
}

ENTRY(backward, Inputs, x, Gradients, o) {
  if (x->back_by_token) {
    const Strips s = strips_of(x);
    OVER_HEADS(token_back_elements(x), token_backward(x, o, head, 0, s.count, work))
  }
  const int64_t most = worth(x->T * x->D * x->M, (x->M + TILE_COLUMNS - 1) / TILE_COLUMNS);
  OVER_TEAMS(work_elements(x) + x->D * x->M + 16, most, backward_head(x, o, head, team, work))
}
