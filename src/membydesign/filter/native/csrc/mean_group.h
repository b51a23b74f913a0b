/* The mean of a strip, a few tokens in one pass, for mean_pass.c: mean_token.h for large D, where a pass over the strip
 * for each token would be bound by loads and stores. For tokens 0 … n-1 of a group that starts from M0, in the letters of
 * mean_pass.c:
 *
 *     p_t = kt_t'M0 + sum_{s<t} kd_st y_s,   o_t = qt_t'M0 + sum_{s<=t} qd_st y_s,   M = f M0 + sum exits_s y_s'
 *
 * What does not depend on value columns is computed once for all strips of a head.
 */
#define GROUP 4                   /* tokens */
#define PER_ROW 16                /* numbers that a row of the mean meets in a group; a multiple of LANES */
#if defined(__AVX512F__) || defined(__ARM_NEON)
#define ABREAST 2                 /* vectors in a row of a strip; half as many registers hold sums of half as many */
#else
#define ABREAST 1
#endif

/* The numbers of row i, side by side: fade, then kt, qt and exits of each token. */
enum { FADE = 0, KEYS = 1, QUERIES = KEYS + GROUP, EXITS = QUERIES + GROUP };

typedef struct {
  REAL *rows;                     /* [D,PER_ROW] */
  REAL kd[GROUP][GROUP], qd[GROUP][GROUP]; /* [s][t] */
} Group;

/* The largest strip whose group of tokens fits in a usual first-level cache is two vectors wide at D = 256. */
static Strips group_strips(const Inputs *x) {
  const int64_t columns = ABREAST * LANES;
  return (Strips){ABREAST, columns, (x->M + columns - 1) / columns};
}

/* Prepare the tokens from the one at `first` in [B,T,H] on, of which `left` are left. `room` has PER_ROW * D numbers. */
static void group_of(Group *g, const Inputs *x, int64_t first, int64_t left, REAL *room) {
  const int64_t D = x->D, H = x->H, R = x->R, count = least(GROUP, left);
  REAL *f = room + FADE * D;
  EACH(i, D) f[i] = 1;
  memset(room + D, 0, (PER_ROW - 1) * D * sizeof(REAL));
  memset(g->kd, 0, sizeof g->kd);
  memset(g->qd, 0, sizeof g->qd);
  EACH(t, count) {
    const int64_t at = first + t * H;
    const REAL *a = x->a + at * R, *q = x->q + at * D, *k = x->k ? x->k + at * D : NULL;
    if (t + GROUP < left) {
      const int64_t later = GROUP * H;
      ask(q + later * D, D, 0);
      ask(a + later * R, R, 0);
      ask(x->d + (at + later) * D, D, 0);
      if (k && k != x->d + at * D) ask(k + later * D, D, 0);
    }
    EACH(s, t + 1) scaled(room + (s < t ? EXITS + s : FADE) * D, a, room + (s < t ? EXITS + s : FADE) * D, R, D);
    SIMD EACH(i, D) room[(QUERIES + t) * D + i] = f[i] * q[i];
    if (k) SIMD EACH(i, D) room[(KEYS + t) * D + i] = f[i] * k[i];
    memcpy(room + (EXITS + t) * D, x->d + at * D, D * sizeof(REAL));
    EACH(s, t + 1) {
      g->qd[s][t] = dot(room + (EXITS + s) * D, q, D);
      if (k && s < t) g->kd[s][t] = dot(room + (EXITS + s) * D, k, D);
    }
  }
  int64_t i = 0;
  for (; i + LANES <= D; i += LANES)
    for (int64_t c = 0; c < PER_ROW; c += LANES) transpose(g->rows + i * PER_ROW + c, room + c * D + i, D, PER_ROW);
  for (; i < D; i++) EACH(c, PER_ROW) g->rows[i * PER_ROW + c] = room[c * D + i];
}

#define ABREAST_OF(h) _Pragma("GCC unroll 2") for (int64_t h = 0; h < ABREAST; h++)

/* Tokens of a group in a strip with mean M, which they change; `left` tokens are left. */
INLINE void group_tokens(int corrects, const Inputs *x, const Outputs *y, const Group *g, REAL *M, int64_t first,
                         int64_t left, int64_t j0, int64_t valid) {
  const int64_t D = x->D, H = x->H, m = x->M, count = least(GROUP, left);
  EACH(t, count) {
    const int64_t at = (first + t * H) * m + j0;
    ask(y->o + at, valid, 1);
    if (t + GROUP < left) ask(x->v + at + GROUP * H * m, valid, 0);
  }
  vec p[GROUP][ABREAST], o[GROUP][ABREAST], w[GROUP][ABREAST];
  _Pragma("GCC unroll 4") EACH(t, GROUP) ABREAST_OF(h) p[t][h] = o[t][h] = (vec){0};
  EACH(i, D) {
    const REAL *row = g->rows + i * PER_ROW;
    vec z[ABREAST];
    ABREAST_OF(h) z[h] = ((const vec *)M)[i * ABREAST + h];
    _Pragma("GCC unroll 4") EACH(t, GROUP) {
      const REAL k = row[KEYS + t], q = row[QUERIES + t];
      ABREAST_OF(h) {
        if (corrects) p[t][h] += k * z[h];
        o[t][h] += q * z[h];
      }
    }
  }
  _Pragma("GCC unroll 4") EACH(t, GROUP) {
    const int64_t at = first + t * H;
    vec e[WIDEST];
    if (t < count) {
      _Pragma("GCC unroll 4") EACH(s, t) ABREAST_OF(h) {
        if (corrects) p[t][h] += g->kd[s][t] * w[s][h];
        o[t][h] += g->qd[s][t] * w[s][h];
      }
      decide(ABREAST, corrects, x, at, j0, valid, p[t], e, w[t]);
      ABREAST_OF(h) o[t][h] += g->qd[t][t] * w[t][h];
      store_columns(ABREAST, y->o + at * m + j0, o[t], valid);
      if (y->e) store_columns(ABREAST, y->e + at * m + j0, e, valid);
    } else {
      ABREAST_OF(h) w[t][h] = (vec){0};
    }
  }
  EACH(i, D) {
    const REAL *row = g->rows + i * PER_ROW;
    vec *at = (vec *)M + i * ABREAST, z[ABREAST];
    ABREAST_OF(h) z[h] = row[FADE] * at[h];
    _Pragma("GCC unroll 4") EACH(t, GROUP) {
      const REAL d = row[EXITS + t];
      ABREAST_OF(h) z[h] += d * w[t][h];
    }
    ABREAST_OF(h) at[h] = z[h];
  }
}

static int64_t group_work(const Inputs *x) {
  const Strips s = group_strips(x);
  const int64_t groups = ((x->C > TOKENS ? x->C : TOKENS) + GROUP - 1) / GROUP;
  return s.count * s.columns * x->D + (groups + 1) * (x->D * PER_ROW + 16) + groups * (int64_t)sizeof(Group) + 64;
}

/* Strips start … end-1 of a head. */
static void group_forward(const Inputs *x, const Outputs *y, int64_t head, int64_t start, int64_t end, REAL *work) {
  const Strips s = group_strips(x);
  const int64_t T = x->T, H = x->H, D = x->D, m = x->M, tile = y->saved ? x->C : TOKENS, K = (T + tile - 1) / tile;
  REAL *M = y->M + head * D * m, *strips = take(&work, s.count * s.columns * D), *room = take(&work, PER_ROW * D);
  Group *groups = (Group *)take(&work, (tile + GROUP - 1) / GROUP * (int64_t)sizeof(Group));
  EACH(j, (tile + GROUP - 1) / GROUP) groups[j].rows = take(&work, PER_ROW * D);
  EACH(i, K + 1) {
    const int64_t begin = i * tile, count = least(tile, T - begin), first = ((head / H) * T + begin) * H + head % H;
    const int64_t n = i < K ? (count + GROUP - 1) / GROUP : 0;
    EACH(j, n) group_of(groups + j, x, first + j * GROUP * H, count - j * GROUP, room);
    for (int64_t strip = start; strip < end; strip++) {
      const int64_t j0 = strip * s.columns, valid = least(s.columns, m - j0);
      REAL *at = strips + strip * s.columns * D;
      if (!i) gather_strip(at, M + j0, D, m, s.columns, valid);
      if (y->saved) scatter_strip(y->saved + (head * (K + 1) + i) * D * m + j0, at, D, m, s.columns, valid);
      if (i == K) scatter_strip(M + j0, at, D, m, s.columns, valid);
      EACH(j, n) {
        const int64_t from = first + j * GROUP * H, tokens = count - j * GROUP;
        if (x->k) group_tokens(1, x, y, groups + j, at, from, tokens, j0, valid);
        else group_tokens(0, x, y, groups + j, at, from, tokens, j0, valid);
      }
    }
  }
}
