/* The mean token by token, for mean_pass.c, which includes it: what is fastest while a head's mean stays in cache.
 *
 * Value columns never mix, so they are split into strips of a few vectors whose rows lie side by side, and threads may
 * share a head. One pass over a strip carries out the last write, reads it, drifts, and predicts the next value:
 *
 *     M += d y',   o = M'q,   M = A M,   p = M'k,      and then   e = v - p,   y = g e      (e = v for additive writes)
 *
 * Backward repeats the predicted means of some tokens and walks back over them, again in one pass for each token.
 */
#define WIDEST 4                  /* vectors in a row of a strip, at most */
#define IN_CACHE (16 << 10)       /* bytes of a strip, at most: half of a small first-level cache */
#define TOKENS 64                 /* tokens that all strips of a head pass before the next tokens */

typedef struct {
  int64_t W, columns, count;      /* vectors and columns of a strip; strips */
} Strips;

static Strips strips_of(const Inputs *x) {
  int64_t W = 1;
  while (W < WIDEST && W * LANES < x->M && 2 * W * x->D * VECTOR_BYTES <= IN_CACHE) W *= 2;
  return (Strips){W, W * LANES, (x->M + W * LANES - 1) / (W * LANES)};
}

#define COLUMNS(h) _Pragma("GCC unroll 4") for (int64_t h = 0; h < W; h++)

/* One token of a strip: `to` = A (from + d y'), o = (from + d y')'q, p = to'k. A and `rows` are as in Inputs. */
INLINE void pass(int W, int rows, int reads, int predicts, const REAL *from, REAL *to, int64_t D, const REAL *restrict d,
                 const vec *y, const REAL *restrict q, vec *o, const REAL *restrict a, const REAL *restrict k, vec *p) {
  vec o0[WIDEST], o1[WIDEST], p0[WIDEST], p1[WIDEST], w[WIDEST];
  COLUMNS(h) o0[h] = o1[h] = p0[h] = p1[h] = (vec){0}, w[h] = y[h];
#define ROW(i, O, P)                                                \
  {                                                                 \
    const REAL di = d[i], qi = reads ? q[i] : 0, ai = a[rows ? (i) : 0], ki = predicts ? k[i] : 0; \
    const vec *x = (const vec *)from + (i) * W;                     \
    vec *z = (vec *)to + (i) * W;                                   \
    COLUMNS(h) {                                                    \
      vec m = x[h] + di * w[h];                                     \
      if (reads) O[h] += qi * m;                                    \
      m *= ai;                                                      \
      if (predicts) P[h] += ki * m;                                 \
      z[h] = m;                                                     \
    }                                                               \
  }
  int64_t i = 0;
  for (; i + 2 <= D; i += 2) {
    ROW(i, o0, p0)
    ROW(i + 1, o1, p1)
  }
  if (i < D) ROW(i, o0, p0)
#undef ROW
  COLUMNS(h) {
    if (reads) o[h] = o0[h] + o1[h];
    if (predicts) p[h] = p0[h] + p1[h];
  }
}

/* Columns of a token in a strip, filled up with zeros, from or to `at`. */
INLINE void load_columns(int W, vec *to, const REAL *at, int64_t valid) {
  if (valid == W * LANES) {
    COLUMNS(h) to[h] = ((const vec *)at)[h];
  } else {
    COLUMNS(h) to[h] = (vec){0};
    memcpy(to, at, valid * sizeof(REAL));
  }
}

INLINE void store_columns(int W, REAL *at, const vec *from, int64_t valid) {
  if (valid == W * LANES) {
    COLUMNS(h) ((vec *)at)[h] = from[h];
  } else {
    memcpy(at, from, valid * sizeof(REAL));
  }
}

/* The strengths of a token's write to columns j0, j0 + 1, … */
INLINE void load_strengths(int W, vec *g, const Inputs *x, int64_t at, int64_t j0, int64_t valid) {
  const REAL *strength = x->strength + at * x->S;
  if (x->S == 1) {
    COLUMNS(h) g[h] = (vec){0} + strength[0];
  } else if (x->S == x->M) {
    load_columns(W, g, strength + j0, valid);
  } else {
    REAL *to = (REAL *)g;
    COLUMNS(h) g[h] = (vec){0};
    EACH(j, valid) to[j] = strength[(j0 + j) / (x->M / x->S)];
  }
}

/* e = v - p and y = g e of a token; e = v if it corrects nothing. */
INLINE void decide(int W, int corrects, const Inputs *x, int64_t at, int64_t j0, int64_t valid, const vec *p, vec *e, vec *y) {
  vec g[WIDEST];
  load_columns(W, e, x->v + at * x->M + j0, valid);
  load_strengths(W, g, x, at, j0, valid);
  COLUMNS(h) {
    if (corrects) e[h] -= p[h];
    y[h] = g[h] * e[h];
  }
}

/* A strip of M [D,m], to or from rows side by side. */
static void gather_strip(REAL *to, const REAL *M, int64_t D, int64_t m, int64_t columns, int64_t valid) {
  if (valid < columns) memset(to, 0, D * columns * sizeof(REAL));
  EACH(i, D) memcpy(to + i * columns, M + i * m, valid * sizeof(REAL));
}

static void scatter_strip(REAL *M, const REAL *from, int64_t D, int64_t m, int64_t columns, int64_t valid) {
  EACH(i, D) memcpy(M + i * m, from + i * columns, valid * sizeof(REAL));
}

/* Rows of tokens lie apart in memory, and processors do not foresee where: ask for those of a token some tokens ahead. */
#define AHEAD 6
INLINE void ask(const REAL *at, int64_t n, int writes) {
  for (int64_t i = 0; i < n; i += CACHE_LINE / (int64_t)sizeof(REAL))
    if (writes) __builtin_prefetch(at + i, 1);
    else __builtin_prefetch(at + i);
}

/* Tokens of a strip from mean M, which they change; `first` is the first one's index in [B,T,H]. */
INLINE void forward_tokens(int W, int rows, int corrects, const Inputs *x, const Outputs *y, REAL *M, int64_t first,
                           int64_t count, int64_t j0, int64_t valid) {
  const int64_t D = x->D, H = x->H, m = x->M;
  const REAL one = 1, *d = x->d + first * D, *q = x->q + first * D;
  vec o[WIDEST], p[WIDEST], e[WIDEST], w[WIDEST];
  COLUMNS(h) p[h] = w[h] = (vec){0};
  EACH(t, count) {
    const int64_t at = first + t * H, before = at - H;
    if (t) d = x->d + before * D, q = x->q + before * D;
    if (t + AHEAD < count) {
      const int64_t later = at + AHEAD * H;
      ask(x->q + later * D, D, 0);
      if (corrects) ask(x->k + later * D, D, 0);
      if (!corrects || x->k != x->d) ask(x->d + later * D, D, 0);
      ask(x->v + later * m + j0, valid, 0);
      ask(y->o + later * m + j0, valid, 1);
    }
    pass(W, rows, 1, corrects, M, M, D, d, w, q, o, x->a + at * x->R, corrects ? x->k + at * D : NULL, p);
    if (t) store_columns(W, y->o + before * m + j0, o, valid);
    decide(W, corrects, x, at, j0, valid, p, e, w);
    if (y->e) store_columns(W, y->e + at * m + j0, e, valid);
  }
  const int64_t last = first + (count - 1) * H;
  pass(W, 0, 1, 0, M, M, D, x->d + last * D, w, x->q + last * D, o, &one, NULL, p);
  store_columns(W, y->o + last * m + j0, o, valid);
}

/* Functions `name_Wrc` in which W, rows and corrects are constants: each on its own, since compilers take half a minute
 * for all of them in one; and a call of the one that fits a problem. */
#define SPECIALISE_ONE(function, W, r, c, PARAMETERS, ...) \
  static __attribute__((noinline)) void function##_##W##r##c PARAMETERS { function(W, r, c, __VA_ARGS__); }
#define SPECIALISE_WIDTH(function, W, PARAMETERS, ...)           \
  SPECIALISE_ONE(function, W, 0, 0, PARAMETERS, __VA_ARGS__)     \
  SPECIALISE_ONE(function, W, 0, 1, PARAMETERS, __VA_ARGS__)     \
  SPECIALISE_ONE(function, W, 1, 0, PARAMETERS, __VA_ARGS__)     \
  SPECIALISE_ONE(function, W, 1, 1, PARAMETERS, __VA_ARGS__)
#define SPECIALISE(function, PARAMETERS, ...)             \
  SPECIALISE_WIDTH(function, 1, PARAMETERS, __VA_ARGS__)  \
  SPECIALISE_WIDTH(function, 2, PARAMETERS, __VA_ARGS__)  \
  SPECIALISE_WIDTH(function, 4, PARAMETERS, __VA_ARGS__)

#define SPECIALISED(function, ...)                            \
  switch (s.W) {                                              \
    case 4: SPECIALISED_ROWS(function, 4, __VA_ARGS__) break; \
    case 2: SPECIALISED_ROWS(function, 2, __VA_ARGS__) break; \
    default: SPECIALISED_ROWS(function, 1, __VA_ARGS__)       \
  }
#define SPECIALISED_ROWS(function, W, ...)               \
  if (x->R == 1) {                                       \
    if (x->k) function##_##W##01(__VA_ARGS__);           \
    else function##_##W##00(__VA_ARGS__);                \
  } else {                                               \
    if (x->k) function##_##W##11(__VA_ARGS__);           \
    else function##_##W##10(__VA_ARGS__);                \
  }

SPECIALISE(forward_tokens, (const Inputs *x, const Outputs *y, REAL *M, int64_t first, int64_t count, int64_t j0, int64_t valid),
           x, y, M, first, count, j0, valid)

static int64_t token_elements(const Inputs *x) {
  const Strips s = strips_of(x);
  return s.count * s.columns * x->D;
}

/* Strips start … end-1 of a head. */
static void token_forward(const Inputs *x, const Outputs *y, int64_t head, int64_t start, int64_t end, REAL *work) {
  const Strips s = strips_of(x);
  const int64_t T = x->T, H = x->H, D = x->D, m = x->M, tile = y->saved ? x->C : TOKENS, K = (T + tile - 1) / tile;
  REAL *M = y->M + head * D * m;
  EACH(i, K + 1) {
    const int64_t begin = i * tile, count = least(tile, T - begin), first = ((head / H) * T + begin) * H + head % H;
    for (int64_t n = start; n < end; n++) {
      const int64_t j0 = n * s.columns, valid = least(s.columns, m - j0);
      REAL *strip = work + n * s.columns * D;
      if (!i) gather_strip(strip, M + j0, D, m, s.columns, valid);
      if (y->saved) scatter_strip(y->saved + (head * (K + 1) + i) * D * m + j0, strip, D, m, s.columns, valid);
      if (i == K) {
        scatter_strip(M + j0, strip, D, m, s.columns, valid);
        continue;
      }
      SPECIALISED(forward_tokens, x, y, strip, first, count, j0, valid)
    }
  }
}
