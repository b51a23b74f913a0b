/* The gains of a dense covariance that forgets in its own way, in pieces of a few tokens: filter/torch/forgetting.py, in C.
 *
 *     P = s A P A' + lam (I - s A A'),   u = P k,   b = 1/(r2 + k'u),   P -= b u u'
 *
 * It is the covariance of a memory that drifts by sqrt(s) A, with its own process noise. Heads run in parallel. For a piece
 * that starts from P0, with decays sqrt(s) a, R'R = G, and p the decay since the piece's first token:
 *
 *     U = kt P0,   G = U kt' + noise + r2,   J = f U + n k
 *     Z = R'^-1 (J / p),   u_t = R_tt p_t Z_t,   X = p_end Z,   P = f_end P0 f_end + n_end - X'X,   b = 1/R_tt^2
 *
 * A token with s below 1/MOST or above MOST begins a piece, and P drifts to it before: so s = 0 is as good as any other
 * number, and its gradient does not pass through sqrt(s); likewise if pieces have one token each. So does a token where a variance is more than `sure` times its
 * write noise, which would cost a piece more digits than one token by itself.
 *
 * Forward saves P before each window of C tokens, and at the end; backward computes a window anew. b is -1 where a
 * covariance was not positive definite, or is not at the end, and the caller looks.
 */
#include "frame.h"
#include "layout.h"
#include "positive.h"

#define MOST ((REAL)16)                               /* the strongest change of P by one token within a piece */
#define MOST_OF_PIECE ((REAL)(1ull << 20))            /* and by all of them */
#define PIECE (TILE_COLUMNS < 16 ? 16 : TILE_COLUMNS > 32 ? 32 : TILE_COLUMNS) /* tokens in a piece */

#define INPUTS(X)                                                                   \
  X(INT, T) X(INT, H) X(INT, G) X(INT, D)                                           \
  X(INT, R)             /* decays of a token: 1 for all rows, D, or D/2 for pairs */ \
  X(INT, rotates)       /* whether drift turns pairs of rows */                     \
  X(INT, C)             /* tokens between two saved covariances */                  \
  X(INT, piece)         /* tokens in a piece, PIECE at most */                      \
  X(DOUBLE, sure)                                                                   \
  X(READ, k)            /* [B,T,H,D] */                                             \
  X(READ_OR_NULL, q)    /* likewise; NULL if no variances are needed */             \
  X(READ, r2)           /* [B,T,H,G] */                                             \
  X(READ, s)            /* [B,T,H] */                                               \
  X(READ_OR_NULL, lam)  /* [B,T,H]; NULL for zero */                                \
  X(READ, a)            /* [B,T,H,R] */                                             \
  X(READ_OR_NULL, cos)  /* of each turn, [B,T,H,D/2] */                             \
  X(READ_OR_NULL, sin)
STRUCT(Inputs, INPUTS)

#define OUTPUTS(X)                                                                  \
  X(WRITE, P)                /* in: before the first token, out: after the last; [B,H,G,D,D] */ \
  X(WRITE, u)                /* [B,T,H,G,D] */                                      \
  X(WRITE, b)                /* [B,T,H,G] */                                        \
  X(WRITE_OR_NULL, variance) /* [B,T,H,G] */                                        \
  X(WRITE_OR_NULL, saved)    /* P before tokens 0, C, … and at the end: [B,H,G,K+1,D,D] */
STRUCT(Outputs, OUTPUTS)

#define GRADIENTS(X)                                                                \
  X(READ, saved)                                                                    \
  X(READ, u) X(READ_OR_NULL, b) X(READ_OR_NULL, variance) /* of the outputs */      \
  X(WRITE, P)                /* in: gradient of P at the end, out: at the start */  \
  X(WRITE, k) X(WRITE_OR_NULL, q) X(WRITE, r2) X(WRITE, s) X(WRITE_OR_NULL, lam) X(WRITE, log_a) \
  X(WRITE_OR_NULL, angle)    /* of the inputs, zero at first */
STRUCT(Gradients, GRADIENTS)

/* A few tokens of a group, at `first`, `first + H`, … of [B,T,H]. */
typedef struct {
  Frame F;
  int64_t first, n, failed;
  int entered, safe;            /* whether P drifted to the first token by itself; whether Z = X / p is safe */
  const REAL *P;                /* before the piece: of the caller */
  REAL *k, *q, *kt, *qt;        /* [n,D]: in the frame; and faded from the start */
  REAL *noise, *noisy, *p;      /* [n,R]: noise built up; [n,D]: times k; [n,R]: decays since the first token */
  REAL *U, *J, *Z, *Y, *X;      /* [n,D]; Y = p Z is u without R_tt */
  REAL *R, *kk, *qk, *W;        /* [n,n] */
} Piece;

typedef struct {
  REAL *panel, *frame_work, *a, *cos, *sin, *spare, *row;
} Room;

static int64_t room_elements(const Inputs *x) {
  int64_t D = x->D, widest = D > PIECE ? D : PIECE;
  return widest * TILE_COLUMNS + (PIECE + 2 * SUB_BLOCK) * D + 5 * PIECE * D + D * (D + TILE_COLUMNS) + D + 7 * 16;
}

static Room room_of(const Inputs *x, REAL **work) {
  int64_t D = x->D, widest = D > PIECE ? D : PIECE;
  Room m = {take(work, widest * TILE_COLUMNS), take(work, (PIECE + 2 * SUB_BLOCK) * D), take(work, PIECE * D),
            take(work, PIECE * D), take(work, PIECE * D), NULL, NULL};
  m.row = take(work, D);
  m.spare = take(work, 2 * PIECE * D + D * (D + TILE_COLUMNS));
  return m;
}

/* What all pieces of n tokens need at most. */
static int64_t piece_elements(const Inputs *x, int64_t n) { return n * (16 * x->D + 5 * PIECE + 22 * 16); }

static void piece_room(const Inputs *x, const Room *m, Piece *y, int64_t n, REAL **work) {
  int64_t D = x->D;
  y->n = n;
  Frame F = {.c = n, .D = D, .R = x->R > 1 || x->rotates ? D : 1, .work = m->frame_work, .panel = m->panel};
  F.a = take(work, n * F.R), F.f = take(work, n * F.R), F.phi = take(work, n * n);
  F.cos = x->rotates ? take(work, n * D / 2) : NULL, F.sin = x->rotates ? take(work, n * D / 2) : NULL;
  REAL **rows[] = {&y->k, &y->kt, &y->noisy, &y->U, &y->J, &y->Z, &y->Y, &y->X};
  EACH(i, 8) *rows[i] = take(work, n * D);
  y->q = x->q ? take(work, n * D) : NULL, y->qt = x->q ? take(work, n * D) : NULL;
  y->noise = take(work, n * F.R), y->p = take(work, n * F.R);
  REAL **pairs[] = {&y->R, &y->kk, &y->qk, &y->W};
  EACH(i, 4) *pairs[i] = take(work, n * n);
  y->F = F;
}

INLINE int strong(REAL s) { return !(s >= 1 / MOST && s <= MOST); }

/* How many tokens, at most `most`, belong to a piece that starts at `first`. */
static int64_t length_of(const Inputs *x, int64_t first, int64_t most) {
  REAL down = 1, up = 1;
  for (int64_t t = 1; t < most; t++) {
    REAL s = x->s[first + t * x->H];
    if (s < 1) down *= s;
    else up *= s;
    if (strong(s) || up > MOST_OF_PIECE || down * MOST_OF_PIECE * MOST_OF_PIECE < 1) return t;
  }
  return most;
}

/* What the decay `a` of a row leaves to a prior variance: 1 - s a^2. */
INLINE REAL forgotten(REAL s, REAL a) { return 1 - s * (a * a); }

/* The decays of a token, one for all rows or for each: pairs have theirs twice, in `spread`. */
INLINE const REAL *decays(const Inputs *x, int64_t at, REAL *spread) {
  const REAL *a = x->a + at * x->R;
  if (!x->rotates) return a;
  memcpy(spread, a, x->R * sizeof(REAL));
  memcpy(spread + x->R, a, x->R * sizeof(REAL));
  return spread;
}

/* P drifts to a token, but for its turn, which the frame does. */
static void enter_piece(const Inputs *x, const Room *m, int64_t at, REAL *restrict to, const REAL *restrict P) {
  int64_t D = x->D;
  const REAL *restrict a = decays(x, at, m->row), s = x->s[at], lam = x->lam ? x->lam[at] : 0;
  EACH(i, D) {
    REAL ai = x->R == 1 ? a[0] : a[i], c = s * ai, all = c * a[0];
    if (x->R == 1) SIMD EACH(j, D) to[i * D + j] = all * P[i * D + j];
    else SIMD EACH(j, D) to[i * D + j] = c * a[j] * P[i * D + j];
    to[i * D + i] += lam * forgotten(s, ai);
  }
}

/* Decays, noise, keys and queries. */
static void share(const Inputs *x, const Room *m, Piece *y) {
  int64_t n = y->n, D = x->D, H = x->H, R = x->R, half = D / 2, first = y->first;
  Frame *F = &y->F;
  EACH(t, n) {
    int64_t at = first + t * H;
    REAL root = (REAL)sqrt(x->s[at]);
    if (t == 0 && y->entered) EACH(i, R) m->a[i] = 1;
    else scaled(m->a + t * R, &root, x->a + at * R, 1, R);
    if (x->rotates) memcpy(m->cos + t * half, x->cos + at * half, half * sizeof(REAL));
    if (x->rotates) memcpy(m->sin + t * half, x->sin + at * half, half * sizeof(REAL));
  }
  frame_of(F, n, m->a, m->cos, m->sin, R, 1);
  R = F->R;
  enter(F, y->k, x->k + first * D, H * D);
  if (y->q) enter(F, y->q, x->q + first * D, H * D);
  EACH(t, n) {
    int64_t at = first + t * H;
    REAL *noise = y->noise + t * R, lam = x->lam && !(t == 0 && y->entered) ? x->lam[at] : 0, s = x->s[at];
    const REAL *a = decays(x, at, m->row), *own = F->a + t * R;
    SIMD EACH(i, R) noise[i] = lam * forgotten(s, a[i]);
    if (t) SIMD EACH(i, R) noise[i] += own[i] * own[i] * noise[i - R];
    scaled(y->kt + t * D, F->f + t * R, y->k + t * D, R, D);
    if (y->q) scaled(y->qt + t * D, F->f + t * R, y->q + t * D, R, D);
    scaled(y->noisy + t * D, noise, y->k + t * D, R, D);
    if (t) scaled(y->p + t * R, own, y->p + (t - 1) * R, R, R);
    else EACH(i, R) y->p[i] = 1;
  }
  y->safe = 1;
  EACH(i, R) y->safe &= y->p[(n - 1) * R + i] > (REAL)STRONG;
  decayed_products(F, y->k, y->q, y->noisy, y->kk, y->qk, m->spare);
}

/* y / f, row by row. */
INLINE void unscaled(REAL *y, const REAL *f, const REAL *x, int64_t R, int64_t D) {
  if (R > 1) divided(y, x, f, D);
  else SIMD EACH(i, D) y[i] = x[i] / f[0];
}

/* Y and X from J: each token's write without those before it, at its own time and at the end. */
static void resolve(const Inputs *x, const Room *m, Piece *y) {
  int64_t n = y->n, D = x->D, R = y->F.R;
  if (y->safe) {
    EACH(t, n) unscaled(y->Z + t * D, y->p + t * R, y->J + t * D, R, D);
    solve(y->R, n, y->Z, D, D, m->panel);
    EACH(t, n) {
      scaled(y->Y + t * D, y->p + t * R, y->Z + t * D, R, D);
      scaled(y->X + t * D, y->p + (n - 1) * R, y->Z + t * D, R, D);
    }
    return;
  }
  EACH(t, n) {
    REAL *here = y->Y + t * D, scale = 1 / y->R[t * n + t];
    memcpy(here, y->J + t * D, D * sizeof(REAL));
    EACH(u, t) {
      scaled(y->X + u * D, y->F.a + t * R, y->X + u * D, R, D);
      add(here, -y->R[u * n + t], y->X + u * D, D);
    }
    scaled(here, &scale, here, 1, D);
    memcpy(y->X + t * D, here, D * sizeof(REAL));
  }
}

/* Everything about a piece, from P0. Returns the first token, but for the piece's first, where a write is too sure. */
static int64_t condition(const Inputs *x, const Room *m, Piece *y, const REAL *P0, int64_t g) {
  int64_t n = y->n, D = x->D, H = x->H, R = y->F.R;
  REAL *across = m->spare, *G = y->R;
  if (n * 8 <= TILE_COLUMNS) { /* too few for tiles */
    memset(y->U, 0, n * D * sizeof(REAL));
    EACH(t, n) EACH(i, D) add(y->U + t * D, y->kt[t * D + i], P0 + i * D, D);
  } else {
    product(D, n, D, view(P0, D), transposed(y->kt, D), across, n, SET, m->panel); /* U', whose B is small to pack */
    EACH(t, n) EACH(i, D) y->U[t * D + i] = across[i * n + t];
  }
  product(n, n, D, view(y->U, D), transposed(y->kt, D), G, n, SET_UPPER, m->panel);
  EACH(t, n) {
    for (int64_t u = t; u < n; u++) G[t * n + u] += y->kk[t * n + u];
    G[t * n + t] += x->r2[(y->first + t * H) * x->G + g];
  }
  EACH(t, n)
    if (t && sizeof(REAL) < sizeof(double) && G[t * n + t] > (REAL)x->sure * x->r2[(y->first + t * H) * x->G + g]) return t;
  y->failed = cholesky(G, n, m->panel);
  EACH(t, n) {
    memset(G + t * n, 0, t * sizeof(REAL));
    scaled(y->J + t * D, y->F.f + t * R, y->U + t * D, R, D);
    add(y->J + t * D, 1, y->noisy + t * D, D);
  }
  resolve(x, m, y);
  if (!y->q) return n;
  product(n, n, D, view(y->U, D), transposed(y->qt, D), y->W, n, SET_UPPER, m->panel);
  EACH(t, n) {
    memset(y->W + t * n, 0, t * sizeof(REAL));
    for (int64_t u = t; u < n; u++) y->W[t * n + u] += y->qk[t * n + u];
  }
  solve(G, n, y->W, n, n, m->panel);
  EACH(t, n) memset(y->W + t * n, 0, t * sizeof(REAL)); /* a read sees no later write */
  return n;
}

/* The next piece of a window, from P: at most `most` tokens. P0 receives what P is once it drifted to the first token, if
 * that begins a piece for its strength. `tokens` says how many to try, and is set for the next piece: where a write was
 * too sure, the next one probably is. */
static void next_piece(const Inputs *x, const Room *m, Piece *y, const REAL *P, REAL *P0, int64_t first, int64_t most,
                       int64_t g, int64_t *tokens, REAL **work) {
  REAL *before = *work;
  int64_t n = length_of(x, first, least(least(most, PIECE), *tokens));
  y->first = first, y->P = P, y->entered = x->piece == 1 || strong(x->s[first]);
  if (y->entered) enter_piece(x, m, first, P0, P);
  for (int64_t resolved = 0; resolved != n;) {
    n = resolved ? resolved : n;
    *work = before;
    piece_room(x, m, y, n, work);
    share(x, m, y);
    resolved = condition(x, m, y, y->entered ? P0 : P, g);
  }
  *tokens = sizeof(REAL) < sizeof(double) && y->R[0] * y->R[0] > (REAL)x->sure * x->r2[first * x->G + g] ? 1 : x->piece;
}

/* P [n,n] symmetric from its upper triangle. */
static void mirror(REAL *P, int64_t n) {
  for (int64_t i = 0; i < n; i += 16)
    for (int64_t j = i; j < n; j += 16)
      for (int64_t r = i; r < least(i + 16, n); r++)
        for (int64_t u = j > r ? j : r + 1; u < least(j + 16, n); u++) P[u * n + r] = P[r * n + u];
}

/* to = f P f, upper triangle. */
static void fade(REAL *to, const REAL *P, const REAL *f, int64_t R, int64_t D) {
  EACH(i, D) {
    REAL fi = f[R == 1 ? 0 : i], all = fi * f[0];
    const REAL *from = P + i * D;
    REAL *y = to + i * D;
    if (R == 1) SIMD for (int64_t j = i; j < D; j++) y[j] = all * from[j];
    else SIMD for (int64_t j = i; j < D; j++) y[j] = fi * f[j] * from[j];
  }
}

/* to = P after the piece, which P0 may be. */
static void leave_piece(const Inputs *x, const Room *m, const Piece *y, const REAL *P0, REAL *to) {
  int64_t n = y->n, D = x->D, R = y->F.R;
  const REAL *end = y->noise + (n - 1) * R;
  fade(to, P0, y->F.f + (n - 1) * R, R, D);
  EACH(i, D) to[i * D + i] += end[R == 1 ? 0 : i];
  product(D, D, n, transposed(y->X, D), view(y->X, D), to, D, SUBTRACT_UPPER, m->panel);
  mirror(to, D);
  if (x->rotates) {
    turn_covariance(&y->F, to, 1);
    mirror(to, D); /* symmetric to the last bit */
  }
}

/* Out of the frame: real and imaginary parts as neighbours again. */
static void leave_frame(const Frame *F, REAL *restrict to, REAL *restrict x, int64_t t) {
  int64_t D = F->D, half = D / 2;
  if (!F->cos) {
    memcpy(to, x, D * sizeof(REAL));
    return;
  }
  turn_token(F, x, t, 1);
  EACH(i, half) to[2 * i] = x[i], to[2 * i + 1] = x[i + half];
}

static void outputs(const Inputs *x, const Outputs *o, const Room *m, const Piece *y, const REAL *P0, int64_t g) {
  int64_t n = y->n, D = x->D, R = y->F.R;
  REAL *reads = m->spare, *row = reads + n * D;
  if (y->q) product(n, D, D, view(y->qt, D), view(P0, D), reads, D, SET, m->panel);
  EACH(t, n) {
    int64_t at = (y->first + t * x->H) * x->G + g;
    REAL pivot = y->R[t * n + t];
    scaled(row, &pivot, y->Y + t * D, 1, D);
    leave_frame(&y->F, o->u + at * D, row, t);
    o->b[at] = t == y->failed ? -1 : 1 / (pivot * pivot);
    if (!y->q) continue;
    scaled(row, y->noise + t * R, y->q + t * D, R, D);
    REAL total = dot(reads + t * D, y->qt + t * D, D) + dot(row, y->q + t * D, D);
    EACH(u, t + 1) total -= y->W[u * n + t] * y->W[u * n + t];
    o->variance[at] = total;
  }
}

/* Say that P is not positive semi-definite at the end of a head's group: b is -1 from its last write on. */
static void lost(const Inputs *x, const Outputs *y, int64_t head, int64_t g) {
  for (int64_t t = x->T - 1; t >= 0; t--) {
    int64_t at = ((head / x->H) * x->T + t) * x->H + head % x->H;
    y->b[at * x->G + g] = -1;
    EACH(i, x->D) if (x->k[at * x->D + i] != 0) return;
  }
}

static void forward_head(const Inputs *x, const Outputs *o, int64_t head, REAL *work) {
  int64_t T = x->T, H = x->H, G = x->G, D = x->D, C = x->C, K = (T + C - 1) / C;
  Room m = room_of(x, &work);
  REAL *P0 = take(&work, D * D);
  EACH(g, G) {
    int64_t group = head * G + g;
    REAL *P = o->P + group * D * D;
    EACH(i, K + 1) {
      if (o->saved) memcpy(o->saved + (group * (K + 1) + i) * D * D, P, D * D * sizeof(REAL));
      int64_t end = least(T, (i + 1) * C), tokens = x->piece;
      for (int64_t t = i * C; t < end;) {
        Piece y;
        REAL *own = work;
        next_piece(x, &m, &y, P, P0, ((head / H) * T + t) * H + head % H, end - t, g, &tokens, &own);
        const REAL *start = y.entered ? P0 : P;
        outputs(x, o, &m, &y, start, g);
        leave_piece(x, &m, &y, start, P);
        t += y.n;
      }
    }
    if (indefinite(P, D, m.spare)) lost(x, o, head, g);
  }
}

ENTRY(forward, Inputs, x, Outputs, o) {
  OVER_HEADS(room_elements(x) + x->D * x->D + 16 + piece_elements(x, PIECE), forward_head(x, o, head, work))
}

#include "gains_back.h"
