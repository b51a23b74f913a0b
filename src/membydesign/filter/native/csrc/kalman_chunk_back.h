/* The adjoint of kalman_chunk.c, which includes it. d… is the gradient of …; dG is that of a symmetric matrix. */

/* Gradients that all groups of a chunk add to. */
typedef struct {
  REAL *k, *q, *kt, *qt;    /* [c,D] */
  REAL *n, *across;         /* [c,R], [c,D/2] */
  REAL *noisy, *exits;      /* [c,D] */
  REAL *kk, *qk;            /* [c,c], upper triangles */
  REAL *net, *end, *angle;  /* [c,R], [R], [c,D/2]: see frame.h */
  REAL *variance;           /* [c]: gradient of the variances, summed over groups */
} SharedBack;

/* Room of one group. */
typedef struct {
  REAL *Y, *R, *G, *other;  /* [c,width], [c,c], [c,c], [c,c] */
  REAL *U, *along, *o;      /* [c,D], [c,D], [c,M] */
} InsideBack;

static SharedBack shared_back_room(const Inputs *x, REAL **work) {
  int64_t C = x->C, D = x->D;
  SharedBack d;
  REAL **rows[] = {&d.k, &d.q, &d.kt, &d.qt, &d.n, &d.across, &d.noisy, &d.exits, &d.net, &d.angle};
  EACH(i, 10) *rows[i] = take(work, C * D);
  d.kk = take(work, C * C), d.qk = take(work, C * C), d.end = take(work, D), d.variance = take(work, C);
  return d;
}

static InsideBack inside_back_room(const Inputs *x, REAL **work) {
  int64_t C = x->C, D = x->D;
  InsideBack d = {take(work, C * widest(x)), take(work, C * C), take(work, C * C), take(work, C * C),
                  take(work, C * D),         take(work, C * D), take(work, C * x->M)};
  return d;
}

/* The gradient dG of G = R'R, given dR (upper triangle): R^-1 (low(R dR') + low(R dR')') R'^-1 / 2, where low is the
 * lower triangle with half of its diagonal. */
static void cholesky_back(const REAL *R, const REAL *dR, REAL *dG, REAL *other, int64_t c, REAL *panel) {
  product(c, c, c, view(dR, c), transposed(R, c), other, c, SET_UPPER, panel);
  mirror(other, c);
  solve_back(R, c, other, c, c, panel);
  EACH(i, c) EACH(j, c) dG[i * c + j] = other[j * c + i] / 2;
  solve_back(R, c, dG, c, c, panel);
}

/* Through M = fC M0 + X'E and P = fC P0 fC + nC - X'X, before any turn: what does not go through X and E. */
static void exit_back(const Inputs *x, const Shared *s, SharedBack *d, const REAL *M0, const REAL *P0, REAL *dM, REAL *dP) {
  int64_t c = s->F.c, D = x->D, m = x->M, half = D / 2, R = s->F.R;
  const REAL *f = s->F.f + (c - 1) * R;
  REAL *dn = d->n + (c - 1) * R, *dacross = d->across + (c - 1) * half;
  EACH(i, D) dn[R == 1 ? 0 : i] += dP[i * D + i] * (R == 1 ? x->rows[i] : 1);
  if (s->mixed) EACH(i, half) dacross[i] += 2 * dP[i * D + i + half];
  fade(dM, dP, f, R, D, m);
  EACH(i, D) d->end[R == 1 ? 0 : i] += dot(dM + i * m, M0 + i * m, m) + 2 * dot(dP + i * D, P0 + i * D, D);
}

static void group_back(const Inputs *x, const Gradients *o, const Shared *s, const Inside *y, SharedBack *d,
                       InsideBack *e, const REAL *M0, const REAL *P0, REAL *dM, REAL *dP, int64_t first, int64_t g) {
  int64_t c = s->F.c, D = x->D, m = x->M, w = y->width, step = x->H * x->G, at = first * x->G + g, R = s->F.R;
  const REAL *E = y->Y + D, *W = E + m, *end = s->F.f + (c - 1) * R;
  REAL *dE = e->Y + D, *dW = dE + m, *panel = s->F.panel;
  const Into half_upper = {0.5, 1, 1}, subtract_twice = {-2, 1, 0};

  /* [dX | dE | dW], and through the triangular solve */
  EACH(t, c) {
    memcpy(e->o + t * m, o->o + (at + t * step) * m, m * sizeof(REAL));
    memset(dE + t * w, 0, m * sizeof(REAL));
    if (o->squares) add(dE + t * w, 2 * o->squares[at + t * step], E + t * w, m);
  }
  product(c, D, m, view(E, w), transposed(dM, m), e->Y, w, SET, panel);
  product(c, D, D, view(y->Y, w), view(dP, D), e->Y, w, subtract_twice, panel);
  product(c, m, D, view(y->Y, w), view(dM, m), dE, w, ADD, panel);
  product(c, m, c, view(W, w), view(e->o, m), dE, w, ADD, panel);
  product(c, c, m, view(E, w), transposed(e->o, m), dW, w, SET_UPPER, panel);
  EACH(u, c) memset(dW + u * w, 0, u * sizeof(REAL));
  if (o->variance) EACH(u, c) for (int64_t t = u; t < c; t++) dW[u * w + t] -= 2 * o->variance[at + t * step] * W[u * w + t];
  solve_back(y->R, c, e->Y, w, w, panel); /* now the gradients of [fC U + exits | V - Kt M0 | U Qt' + noise] */

  /* R, then G */
  product(c, c, w, view(y->Y, w), transposed(e->Y, w), e->R, c, SET_UPPER, panel);
  EACH(u, c) {
    REAL pivot = y->R[u * c + u];
    EACH(t, c) e->R[u * c + t] = t < u ? 0 : -e->R[u * c + t];
    if (o->b) e->R[u * c + u] -= 2 * o->b[at + u * step] / (pivot * pivot * pivot);
  }
  cholesky_back(y->R, e->R, e->G, e->other, c, panel);
  EACH(u, c) {
    o->r2[at + u * step] = e->G[u * c + u];
    d->kk[u * c + u] += e->G[u * c + u];
    for (int64_t t = u + 1; t < c; t++) d->kk[u * c + t] += e->G[u * c + t] + e->G[t * c + u];
    add(d->qk + u * c + u, 1, dW + u * w + u, c - u);
  }

  /* U, Kt and Qt */
  product(c, D, c, view(e->G, c), view(s->kt, D), e->along, D, SET, panel);
  EACH(t, c) {
    scaled(e->U + t * D, end, e->Y + t * w, R, D);
    gather(d->end, 1, e->U + t * D, y->U + t * D, R, D);
    add(e->U + t * D, 1, e->along + t * D, D);
    add(d->exits + t * D, 1, e->Y + t * w, D);
  }
  product(c, D, c, view(dW, w), view(s->qt, D), e->U, D, ADD, panel);
  EACH(i, c * D) e->along[i] += e->U[i];
  product(c, D, D, view(e->along, D), view(P0, D), d->kt, D, ADD, panel);
  product(c, D, m, view(dE, w), transposed(M0, m), d->kt, D, SUBTRACT, panel);
  product(c, D, c, transposed(dW, w), view(y->U, D), d->qt, D, ADD, panel);
  product(c, D, m, view(e->o, m), transposed(M0, m), d->qt, D, ADD, panel);

  /* the values, and the belief at the start */
  EACH(t, c) memcpy(o->v + (at + t * step) * m, dE + t * w, m * sizeof(REAL));
  exit_back(x, s, d, M0, P0, dM, dP);
  product(D, m, c, transposed(s->kt, D), view(dE, w), dM, m, SUBTRACT, panel);
  product(D, m, c, transposed(s->qt, D), view(e->o, m), dM, m, ADD, panel);
  product(D, D, c, transposed(s->kt, D), view(e->U, D), dP, D, half_upper, panel);
  product(D, D, c, transposed(e->U, D), view(s->kt, D), dP, D, half_upper, panel);
  if (o->variance) {
    EACH(t, c) {
      REAL weight = o->variance[at + t * step];
      d->variance[t] += weight;
      scaled(e->along + t * D, &weight, s->qt + t * D, 1, D);
    }
    product(D, D, c, transposed(e->along, D), view(s->qt, D), dP, D, (Into){1, 1, 1}, panel);
    product(c, D, D, view(e->along, D), view(P0, D), d->qt, D, (Into){2, 1, 0}, panel);
  }
  mirror(dP, D);
}

/* Noise built up, from the last token to the first: n_t = a_t^2 n_{t-1} + l2_t N(Theta_t), or l2_t (1 - a_t^2). */
static void noise_back(const Inputs *x, const Gradients *o, const Shared *s, SharedBack *d, int64_t first) {
  int64_t D = x->D, half = D / 2, R = s->F.R, H = x->H;
  for (int64_t t = s->F.c - 1; t >= 0; t--) {
    int64_t at = first + t * H;
    const REAL *a = s->F.a + t * R, *n = s->n + (t - 1) * R, *across = s->across + (t - 1) * half;
    REAL *dn = d->n + t * R, *dx = d->across + t * half, l2 = x->l2[at], total = 0;
    if (x->log_a) entering(x, s, t, first, d->exits);
    if (x->log_a) EACH(i, R) {
      o->log_a[at * x->R + i % x->R] += 2 * a[i] * a[i] * ((t ? n[i] : 0) - l2) * dn[i];
      if (t) dn[i - R] += a[i] * a[i] * dn[i];
      total += d->exits[i] * dn[i]; /* room for a row, as in shared_back */
    }
    else EACH(i, R) {
      if (t) {
        o->log_a[at * x->R + i % x->R] += 2 * a[i] * a[i] * n[i] * dn[i];
        dn[i - R] += a[i] * a[i] * dn[i];
      }
      if (!s->mixed) total += (R == 1 ? 1 : x->rows[i]) * dn[i];
    }
    if (s->mixed) EACH(i, half) {
      REAL r = s->F.cos[t * half + i], v = s->F.sin[t * half + i], real = x->rows[i], imaginary = x->rows[i + half];
      REAL first_row = dn[i], second = dn[i + half];
      if (t) {
        o->log_a[at * x->R + i] += 2 * a[i] * a[i] * across[i] * dx[i];
        dx[i - half] += a[i] * a[i] * dx[i];
      }
      total += first_row * (r * r * real + v * v * imaginary) + second * (v * v * real + r * r * imaginary) +
               dx[i] * r * v * (imaginary - real);
      d->angle[t * half + i] +=
          l2 * (imaginary - real) * (2 * r * v * (first_row - second) + (r * r - v * v) * dx[i]);
    }
    o->l2[at] += total;
  }
}

static void shared_back(const Inputs *x, const Gradients *o, const Shared *s, SharedBack *d, int64_t first) {
  int64_t c = s->F.c, D = x->D, half = D / 2, R = s->F.R, H = x->H;
  decayed_products_back(&s->F, s->k, s->q, s->noisy, s->kk, s->qk, s->exits, d->kk, d->qk, d->exits, d->k, d->q,
                        d->noisy, d->net, d->end);
  REAL *own = d->exits; /* no longer needed: room for a row */
  EACH(t, c) {
    REAL *dk = d->k + t * D, *dq = d->q + t * D, *dnoisy = d->noisy + t * D, *dn = d->n + t * R;
    const REAL *k = s->k + t * D, *q = s->q + t * D, *f = s->F.f + t * R;
    gather(d->net + t * R, 1, s->kt + t * D, d->kt + t * D, R, D);
    gather(d->net + t * R, 1, s->qt + t * D, d->qt + t * D, R, D);
    scaled(own, f, d->kt + t * D, R, D), add(dk, 1, own, D);
    scaled(own, f, d->qt + t * D, R, D), add(dq, 1, own, D);
    noisy_row(s, x->rows, t, own, dnoisy), add(dk, 1, own, D);
    noisy_row(s, x->rows, t, own, q), add(dq, 2 * d->variance[t], own, D);
    EACH(i, D) dn[R == 1 ? 0 : i] += (R == 1 ? x->rows[i] : 1) * (k[i] * dnoisy[i] + d->variance[t] * q[i] * q[i]);
    if (s->mixed) EACH(i, half) {
      d->across[t * half + i] += k[i + half] * dnoisy[i] + k[i] * dnoisy[i + half] + 2 * d->variance[t] * q[i] * q[i + half];
    }
  }
  noise_back(x, o, s, d, first);
  enter_back(&s->F, s->k, d->k, o->k + first * D, H * D, d->angle);
  enter_back(&s->F, s->q, d->q, o->q + first * D, H * D, d->angle);
  drift_back(&s->F, d->net, d->end, d->angle, o->log_a + first * x->R, x->rotates ? o->angle + first * half : NULL, x->R, H);
}

static void backward_head(const Inputs *x, const Gradients *o, int64_t head, REAL *work) {
  int64_t T = x->T, H = x->H, G = x->G, D = x->D, m = x->M, C = x->C, K = (T + C - 1) / C;
  Shared s = shared_room(x, &work);
  Inside y = inside_room(x, &work);
  SharedBack d = shared_back_room(x, &work);
  InsideBack e = inside_back_room(x, &work);
  for (int64_t i = K - 1; i >= 0; i--) {
    int64_t start = i * C, c = least(C, T - start), first = ((head / H) * T + start) * H + head % H;
    share(x, &s, first, c);
    memset(d.k, 0, (d.kk - d.k) * sizeof(REAL)); /* all that lies before kk, in one piece */
    memset(d.kk, 0, c * c * sizeof(REAL));
    memset(d.qk, 0, c * c * sizeof(REAL));
    memset(d.end, 0, D * sizeof(REAL));
    memset(d.variance, 0, c * sizeof(REAL));
    EACH(g, G) {
      int64_t n = head * G + g, slot = n * (K + 1) + i;
      const REAL *M = o->saved_M + slot * D * m, *P = o->saved_P + slot * D * D;
      REAL *dM = o->M + n * D * m, *dP = o->P + n * D * D;
      if (x->rotates) {
        REAL *angle = d.angle + (c - 1) * (D / 2);
        turn_angle(&s.F, angle, 1, M + D * m, dM, m);
        turn_angle(&s.F, angle, 2, P + D * D, dP, D);
        turn_memory(&s.F, dM, m, m, -1);
        turn_covariance(&s.F, dP, -1);
      }
      condition(x, &s, &y, M, P, first, g);
      group_back(x, o, &s, &y, &d, &e, M, P, dM, dP, first, g);
    }
    shared_back(x, o, &s, &d, first);
  }
}

ENTRY(backward, Inputs, x, Gradients, o) {
  OVER_HEADS(work_elements(x), backward_head(x, o, head, work))
}
