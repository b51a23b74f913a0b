/* The adjoint of mean_token.h; d… is the gradient of …. For each token, from the last one on, and M̄ = A M:
 *
 *     dM += q do',   dq = M̄ do + d (y'do),   dy = dM'd,   dd = dM y,   de += g dy,   dg = e'dy
 *     dv = de,   dk = -M̄ de,   dM = A (dM - k de'),   d(log a) = sum of dM̄ M̄ over columns at M̄
 */
/* total[i] += sign times the sum of all entries of rows[i]. */
INLINE void sum_rows(const vec *rows, int64_t n, REAL sign, REAL *restrict total) {
  int64_t i = 0;
#ifdef SHUFFLES
  for (; i + LANES <= n; i += LANES) { /* neighbours are added until one vector has the sums of all rows */
    vec x[SHUFFLES];
    _Pragma("GCC unroll 16") EACH(j, LANES) x[j] = rows[i + j];
    _Pragma("GCC unroll 4") for (int64_t left = LANES / 2; left; left /= 2)
      _Pragma("GCC unroll 8") EACH(j, left)
        x[j] = __builtin_shufflevector(x[2 * j], x[2 * j + 1], EVEN) + __builtin_shufflevector(x[2 * j], x[2 * j + 1], ODD);
    *(vec *)(total + i) += sign * x[0];
  }
#endif
  for (; i < n; i++) {
    REAL sum = 0;
    EACH(j, LANES) sum += rows[i][j];
    total[i] += sign * sum;
  }
}

/* A token that lies behind, and one that is met, in a walk from the last token to the first. */
typedef struct {
  const REAL *M, *k, *a; /* predicted mean, key and decay of the token behind */
  vec de[WIDEST], *dk, *da;
} Behind;

typedef struct {
  const REAL *M, *q, *d; /* predicted mean, query and direction of the token met */
  vec o[WIDEST], y[WIDEST], dy[WIDEST], *dq, *dd; /* o: the gradient of the output */
} Met;

/* Leave one token and meet the one before it: dM after the one becomes dM after the other, with what it reads. */
INLINE void walk(int W, int rows, int corrects, int leaves, int meets, REAL *dM, int64_t D, Behind *x, Met *y) {
  vec de[WIDEST], o[WIDEST], w[WIDEST], dy[WIDEST], all = {0};
  COLUMNS(h) {
    dy[h] = (vec){0};
    if (leaves && corrects) de[h] = x->de[h];
    if (meets) o[h] = y->o[h], w[h] = y->y[h];
  }
  EACH(i, D) {
    vec *at = (vec *)dM + i * W, along_k = {0}, along_q = {0}, along_d = {0}, along_a = {0};
    const REAL ki = leaves && corrects ? x->k[i] : 0, ai = leaves ? x->a[rows ? i : 0] : 0;
    const REAL qi = meets ? y->q[i] : 0, di = meets ? y->d[i] : 0;
    COLUMNS(h) {
      vec z = at[h];
      if (leaves) {
        const vec m = ((const vec *)x->M)[i * W + h];
        if (corrects) z -= ki * de[h], along_k += m * de[h];
        along_a += z * m;
        z *= ai;
      }
      if (meets) {
        z += qi * o[h];
        along_q += ((const vec *)y->M)[i * W + h] * o[h];
        dy[h] += di * z;
        along_d += z * w[h];
      }
      at[h] = z;
    }
    if (leaves && corrects) x->dk[i] = along_k;
    if (leaves && rows) x->da[i] = along_a;
    if (leaves && !rows) all += along_a;
    if (meets) y->dq[i] = along_q, y->dd[i] = along_d;
  }
  if (leaves && !rows) x->da[0] = all;
  if (meets) COLUMNS(h) y->dy[h] = dy[h];
}

/* The room of a strip: the predicted means of C tokens, their errors and writes, and sums over columns that are not
 * yet summed over lanes. */
typedef struct {
  REAL *M, *e, *y;
  vec *dk, *dq, *dd, *da;
} StripBack;

static int64_t strip_back_elements(const Inputs *x, Strips s) {
  return x->C * (x->D + 2) * s.columns + 4 * x->D * LANES;
}

static StripBack strip_back_room(const Inputs *x, Strips s, REAL *work) {
  StripBack r = {.M = work, .e = work + x->C * x->D * s.columns};
  r.y = r.e + x->C * s.columns;
  r.dk = (vec *)(r.y + x->C * s.columns), r.dq = r.dk + x->D, r.dd = r.dq + x->D, r.da = r.dd + x->D;
  return r;
}

/* Predicted means, errors and writes of some tokens anew, from the mean at their start in r->M + (C - 1) tokens. */
INLINE void repeat_tokens(int W, int rows, int corrects, const Inputs *x, const StripBack *r, int64_t first, int64_t count,
                          int64_t j0, int64_t valid) {
  const int64_t D = x->D, H = x->H, size = D * W * LANES;
  const REAL *from = r->M + (x->C - 1) * size, *d = x->d + first * D;
  vec p[WIDEST], w[WIDEST], *e = (vec *)r->e, *y = (vec *)r->y;
  COLUMNS(h) p[h] = w[h] = (vec){0};
  EACH(t, count) {
    const int64_t at = first + t * H;
    REAL *to = r->M + t * size;
    pass(W, rows, 0, corrects, from, to, D, d, w, NULL, NULL, x->a + at * x->R, corrects ? x->k + at * D : NULL, p);
    decide(W, corrects, x, at, j0, valid, p, e + t * W, w);
    COLUMNS(h) y[t * W + h] = w[h];
    from = to, d = x->d + at * D;
  }
}

/* The gradient of a write's strengths, and de from dy. */
INLINE void decide_back(int W, const Inputs *x, const Gradients *o, int64_t at, int64_t j0, int64_t valid, const vec *e,
                        const vec *dy, vec *de) {
  vec g[WIDEST], dg[WIDEST], sum = {0};
  REAL *strength = o->strength + at * x->S;
  load_strengths(W, g, x, at, j0, valid);
  COLUMNS(h) {
    de[h] = (vec){0};
    dg[h] = dy[h] * e[h];
    sum += dg[h];
  }
  if (o->e) load_columns(W, de, o->e + at * x->M + j0, valid);
  COLUMNS(h) de[h] += g[h] * dy[h];
  if (x->S == 1) {
    sum_rows(&sum, 1, 1, strength);
  } else {
    EACH(j, valid) strength[(j0 + j) / (x->M / x->S)] += dg[j / LANES][j % LANES];
  }
  store_columns(W, o->v + at * x->M + j0, de, valid);
}

/* Gradients of the key and decay of a token that was left. */
INLINE void behind_back(int rows, int corrects, const Gradients *o, const Behind *x, int64_t at, int64_t D) {
  const int64_t R = rows ? D : 1;
  if (corrects) sum_rows(x->dk, D, -1, o->k + at * D);
  sum_rows(x->da, R, 1, o->log_a + at * R);
}

/* Tokens of a strip from the last to the first; dM is changed from what it is after them to what it is before them. */
INLINE void backward_tokens(int W, int rows, int corrects, const Inputs *x, const Gradients *o, const StripBack *r,
                            REAL *dM, int64_t first, int64_t count, int64_t j0, int64_t valid) {
  const int64_t D = x->D, H = x->H, size = D * W * LANES;
  repeat_tokens(W, rows, corrects, x, r, first, count, j0, valid);
  Behind behind = {.dk = r->dk, .da = r->da};
  Met met = {.dq = r->dq, .dd = r->dd};
  for (int64_t t = count - 1; t >= 0; t--) {
    const int64_t at = first + t * H;
    const vec *e = (const vec *)r->e + t * W, *y = (const vec *)r->y + t * W;
    vec read = {0};
    load_columns(W, met.o, o->o + at * x->M + j0, valid);
    COLUMNS(h) met.y[h] = y[h], read += y[h] * met.o[h];
    met.M = r->M + t * size, met.q = x->q + at * D, met.d = x->d + at * D;
    if (t == count - 1) walk(W, rows, corrects, 0, 1, dM, D, &behind, &met);
    else walk(W, rows, corrects, 1, 1, dM, D, &behind, &met);
    if (t < count - 1) behind_back(rows, corrects, o, &behind, at + H, D);
    REAL *dq = o->q + at * D, sum = 0;
    sum_rows(&read, 1, 1, &sum);
    sum_rows(met.dq, D, 1, dq);
    add(dq, sum, met.d, D);
    sum_rows(met.dd, D, 1, o->d + at * D);
    decide_back(W, x, o, at, j0, valid, e, met.dy, behind.de);
    behind.M = met.M, behind.k = corrects ? x->k + at * D : NULL, behind.a = x->a + at * x->R;
  }
  walk(W, rows, corrects, 1, 0, dM, D, &behind, &met);
  behind_back(rows, corrects, o, &behind, first, D);
}

SPECIALISE(backward_tokens, (const Inputs *x, const Gradients *o, const StripBack *r, REAL *dM, int64_t first, int64_t count,
                             int64_t j0, int64_t valid),
           x, o, r, dM, first, count, j0, valid)

static int64_t token_back_elements(const Inputs *x) {
  return token_elements(x) + strip_back_elements(x, strips_of(x));
}

/* Strips start … end-1 of a head. */
static void token_backward(const Inputs *x, const Gradients *o, int64_t head, int64_t start, int64_t end, REAL *work) {
  const Strips s = strips_of(x);
  const int64_t T = x->T, H = x->H, D = x->D, m = x->M, C = x->C, K = (T + C - 1) / C;
  const StripBack r = strip_back_room(x, s, work + token_elements(x));
  REAL *dM = o->M + head * D * m;
  for (int64_t i = K - 1; i >= 0; i--) {
    const int64_t begin = i * C, count = least(C, T - begin), first = ((head / H) * T + begin) * H + head % H;
    const REAL *saved = o->saved + (head * (K + 1) + i) * D * m;
    for (int64_t n = start; n < end; n++) {
      const int64_t j0 = n * s.columns, valid = least(s.columns, m - j0);
      REAL *strip = work + n * s.columns * D;
      if (i == K - 1) gather_strip(strip, dM + j0, D, m, s.columns, valid);
      gather_strip(r.M + (C - 1) * D * s.columns, saved + j0, D, m, s.columns, valid);
      SPECIALISED(backward_tokens, x, o, &r, strip, first, count, j0, valid)
      if (!i) scatter_strip(dM + j0, strip, D, m, s.columns, valid);
    }
  }
}
