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
  REAL *Y, *R, *G, *other;   /* [c,width], [c,c], [c,c], [c,c] */
  REAL *U, *along, *o;       /* [c,D], [c,D], [c,M] */
  REAL *weighted;            /* [c,D]: queries, each times the gradient of its variance */
  REAL *end, *n, *across;    /* [D], [D], [D/2]: of the decay and of the noise at the chunk's end, row by row */
} InsideBack;

/* What a thread has of a chunk, and others may read. */
typedef struct {
  Shared s;
  Inside y;
  SharedBack d;
  InsideBack e;
} BackRoom;

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
                  take(work, C * D),         take(work, C * D), take(work, C * x->M), take(work, C * D),
                  take(work, D),             take(work, D),     take(work, D / 2)};
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

/* Rows of M = fC M0 + X'E and P = fC P0 fC + nC - X'X, before any turn: what does not go through X and E. */
static void exit_back(const Inputs *x, const Shared *s, InsideBack *e, const REAL *M0, const REAL *P0, REAL *dM, REAL *dP,
                      Range rows) {
  int64_t c = s->F.c, D = x->D, m = x->M, half = D / 2, R = s->F.R;
  const REAL *f = s->F.f + (c - 1) * R;
  for (int64_t i = rows.start; i < rows.end; i++) {
    e->n[i] = dP[i * D + i] * (R == 1 ? x->rows[i] : 1);
    if (i < half) e->across[i] = 2 * dP[i * D + i + half];
  }
  fade(dP, f, R, D, rows, (Range){0, D});
  for (int64_t i = rows.start; i < rows.end; i++) {
    scaled(dM + i * m, f + (R == 1 ? 0 : i), dM + i * m, 1, m);
    e->end[i] = dot(dM + i * m, M0 + i * m, m) + 2 * dot(dP + i * D, P0 + i * D, D);
  }
}

/* A group of a chunk anew, and what does not depend on the gradient of the belief at the chunk's end. */
static void before_walk(const Inputs *x, const Gradients *o, const Shared *s, Inside *y, SharedBack *d, InsideBack *e,
                        const REAL *M0, const REAL *P0, int64_t first, int64_t g) {
  REAL *panel = s->F.panel;
  condition(x, NULL, s, y, M0, P0, first, g, &ALONE, panel);
  int64_t c = s->F.c, D = x->D, m = x->M, w = y->width, step = x->H * x->G, at = first * x->G + g;
  const REAL *E = y->Y + D, *W = E + m;
  REAL *dE = e->Y + D, *dW = dE + m;
  EACH(t, c) {
    memcpy(e->o + t * m, o->o + (at + t * step) * m, m * sizeof(REAL));
    memset(dE + t * w, 0, m * sizeof(REAL));
    if (o->squares) add(dE + t * w, 2 * o->squares[at + t * step], E + t * w, m);
  }
  product(c, m, c, view(W, w), view(e->o, m), dE, w, ADD, panel);
  product(c, c, m, view(E, w), transposed(e->o, m), dW, w, SET_UPPER, panel);
  EACH(u, c) memset(dW + u * w, 0, u * sizeof(REAL));
  product(c, D, m, view(e->o, m), transposed(M0, m), d->qt, D, ADD, panel);
  if (!o->variance) return;
  EACH(u, c) {
    for (int64_t t = u; t < c; t++) dW[u * w + t] -= 2 * o->variance[at + t * step] * W[u * w + t];
    const REAL weight = o->variance[at + u * step];
    d->variance[u] += weight;
    scaled(e->weighted + u * D, &weight, s->qt + u * D, 1, D);
  }
  product(c, D, D, view(e->weighted, D), view(P0, D), d->qt, D, (Into){2, 1, 0}, panel);
}

/* The gradient dG of G from those of Y and of b. */
static void factor_back(const Inputs *x, const Gradients *o, const Inside *y, InsideBack *e, int64_t c, int64_t first,
                        int64_t g, REAL *panel) {
  const int64_t step = x->H * x->G, at = first * x->G + g;
  EACH(u, c) {
    REAL pivot = y->R[u * c + u];
    EACH(t, c) e->R[u * c + t] = t < u ? 0 : -e->R[u * c + t];
    if (o->b) e->R[u * c + u] -= 2 * o->b[at + u * step] / (pivot * pivot * pivot);
  }
  cholesky_back(y->R, e->R, e->G, e->other, c, panel);
}

/* dM and dP from a chunk's end to its start, by a whole team. */
static void walk_group(const Inputs *x, const Gradients *o, const Shared *s, const Inside *y, InsideBack *e,
                       const REAL *M0, const REAL *P0, REAL *dM, REAL *dP, int64_t first, int64_t g, const Team *team,
                       REAL *panel) {
  int64_t c = s->F.c, D = x->D, m = x->M, w = y->width, R = s->F.R;
  const REAL *E = y->Y + D, *end = s->F.f + (c - 1) * R;
  REAL *dE = e->Y + D, *dW = dE + m;
  const Range rows = part(team, D, TILE_COLUMNS), columns = part(team, m, TILE_COLUMNS), all = part(team, w, TILE_COLUMNS);
  const int64_t r0 = rows.start, nr = rows.end - r0, j0 = columns.start, nj = columns.end - j0;

  /* [dX | dE | dW], and through the triangular solve */
  product(c, nr, m, view(E, w), transposed(dM + r0 * m, m), e->Y + r0, w, SET, panel);
  product(c, nr, D, view(y->Y, w), view(dP + r0, D), e->Y + r0, w, (Into){-2, 1, 0}, panel);
  product(c, nj, D, view(y->Y, w), view(dM + j0, m), dE + j0, w, ADD, panel);
  meet(team);
  solve_back(y->R, c, e->Y + all.start, all.end - all.start, w, panel); /* now of what R'^-1 was applied to */
  meet(team);

  /* R, then G; meanwhile, what the belief at the end has directly of that at the start */
  product_upper(team, c, w, view(y->Y, w), transposed(e->Y, w), e->R, c, 1, 0, panel);
  meet(team);
  if (team->rank == 0) factor_back(x, o, y, e, c, first, g, panel);
  if (team->rank || team->size == 1)
    exit_back(x, s, e, M0, P0, dM, dP, team->size == 1 ? (Range){0, D} : part_of(D, 1, team->rank - 1, team->size - 1));
  meet(team);

  /* U, and the belief at the start */
  product(c, nr, c, view(e->G, c), view(s->kt + r0, D), e->along + r0, D, SET, panel);
  EACH(t, c) {
    scaled(e->U + t * D + r0, end + (R == 1 ? 0 : r0), e->Y + t * w + r0, R, nr);
    add(e->U + t * D + r0, 1, e->along + t * D + r0, nr);
  }
  product(c, nr, c, view(dW, w), view(s->qt + r0, D), e->U + r0, D, ADD, panel);
  EACH(t, c) add(e->along + t * D + r0, 1, e->U + t * D + r0, nr);
  product(D, nj, c, transposed(s->kt, D), view(dE + j0, w), dM + j0, m, SUBTRACT, panel);
  product(D, nj, c, transposed(s->qt, D), view(e->o + j0, m), dM + j0, m, ADD, panel);
  meet(team);
  /* dP += (Kt'U + U'Kt) / 2, which for all rows is added in another order below the diagonal: hence the upper triangle */
  product_upper(team, D, c, transposed(s->kt, D), view(e->U, D), dP, D, 0.5, 1, panel);
  product_upper(team, D, c, transposed(e->U, D), view(s->kt, D), dP, D, 0.5, 1, panel);
  if (o->variance) product_upper(team, D, c, transposed(e->weighted, D), view(s->qt, D), dP, D, 1, 1, panel);
  meet(team);
  if (team->rank == 0) mirror(dP, D);
  meet(team);
}

/* What a group's walk says of what all groups share, and of its own inputs. */
static void after_walk(const Inputs *x, const Gradients *o, const Shared *s, const Inside *y, SharedBack *d, InsideBack *e,
                       const REAL *M0, const REAL *P0, int64_t first, int64_t g) {
  int64_t c = s->F.c, D = x->D, m = x->M, w = y->width, step = x->H * x->G, at = first * x->G + g, R = s->F.R;
  const REAL *end = s->F.f + (c - 1) * R;
  REAL *dE = e->Y + D, *dW = dE + m, *panel = s->F.panel, *dn = d->n + (c - 1) * R;
  EACH(u, c) {
    o->r2[at + u * step] = e->G[u * c + u];
    d->kk[u * c + u] += e->G[u * c + u];
    for (int64_t t = u + 1; t < c; t++) d->kk[u * c + t] += e->G[u * c + t] + e->G[t * c + u];
    add(d->qk + u * c + u, 1, dW + u * w + u, c - u);
    memcpy(o->v + (at + u * step) * m, dE + u * w, m * sizeof(REAL));
  }
  EACH(i, D) dn[R == 1 ? 0 : i] += e->n[i], d->end[R == 1 ? 0 : i] += e->end[i];
  if (s->mixed) add(d->across + (c - 1) * (D / 2), 1, e->across, D / 2);
  product(c, D, D, view(e->along, D), view(P0, D), d->kt, D, ADD, panel);
  product(c, D, m, view(dE, w), transposed(M0, m), d->kt, D, SUBTRACT, panel);
  product(c, D, c, transposed(dW, w), view(y->U, D), d->qt, D, ADD, panel);
  EACH(t, c) {
    add(d->exits + t * D, 1, e->Y + t * w, D);
    scaled(e->U + t * D, end, e->Y + t * w, R, D); /* dU is no longer needed */
    gather(d->end, 1, e->U + t * D, y->U + t * D, R, D);
  }
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

/* The gradient of a belief at a chunk's end, turned back, and that of the angle. */
static void turn_back(const Inputs *x, BackRoom *room, const REAL *M, const REAL *P, REAL *dM, REAL *dP, const Team *team) {
  const int64_t D = x->D, m = x->M;
  REAL *angle = room->d.angle + (room->s.F.c - 1) * (D / 2);
  if (!x->rotates) return;
  if (team->rank == 0) {
    turn_angle(&room->s.F, angle, 1, M + D * m, dM, m);
    turn_angle(&room->s.F, angle, 2, P + D * D, dP, D);
    turn_memory(&room->s.F, dM, m, m, -1);
    turn_covariance(&room->s.F, dP, -1);
  }
  meet(team);
}

static void backward_head(const Inputs *x, const Gradients *o, int64_t head, const Team *team, REAL *work) {
  int64_t T = x->T, H = x->H, G = x->G, D = x->D, m = x->M, C = x->C, K = (T + C - 1) / C;
  BackRoom mine = {.s = shared_room(x, &work)}, *rooms[TEAM_MOST] = {&mine};
  mine.y = inside_room(x, &work), mine.d = shared_back_room(x, &work), mine.e = inside_back_room(x, &work);
  team_rooms(team, &mine, (void **)rooms);
  SharedBack *d = &mine.d;
  const int64_t first_of_head = (head / H) * T * H + head % H;
  for (int64_t last = K - 1; last >= 0; last -= team->size) { /* chunks last, last - 1, …: one for each thread */
    const int64_t own = last - team->rank, c = own < 0 ? 0 : least(C, T - own * C), first = first_of_head + own * C * H;
    if (own >= 0) {
      share(x, &mine.s, first, c);
      memset(d->k, 0, (d->kk - d->k) * sizeof(REAL)); /* all that lies before kk, in one piece */
      memset(d->kk, 0, c * c * sizeof(REAL));
      memset(d->qk, 0, c * c * sizeof(REAL));
      memset(d->end, 0, D * sizeof(REAL));
      memset(d->variance, 0, c * sizeof(REAL));
    }
    EACH(g, G) {
      const int64_t n = head * G + g;
      const REAL *M0 = o->saved_M + n * (K + 1) * D * m, *P0 = o->saved_P + n * (K + 1) * D * D;
      REAL *dM = o->M + n * D * m, *dP = o->P + n * D * D;
      if (own >= 0) before_walk(x, o, &mine.s, &mine.y, d, &mine.e, M0 + own * D * m, P0 + own * D * D, first, g);
      meet(team);
      EACH(r, least(team->size, last + 1)) {
        BackRoom *room = rooms[r];
        const int64_t i = last - r;
        const REAL *M = M0 + i * D * m, *P = P0 + i * D * D;
        turn_back(x, room, M, P, dM, dP, team);
        walk_group(x, o, &room->s, &room->y, &room->e, M, P, dM, dP, first_of_head + i * C * H, g, team, mine.s.F.panel);
      }
      if (own >= 0) after_walk(x, o, &mine.s, &mine.y, d, &mine.e, M0 + own * D * m, P0 + own * D * D, first, g);
    }
    if (own >= 0) shared_back(x, o, &mine.s, d, first);
  }
}

ENTRY(backward, Inputs, x, Gradients, o) {
  OVER_TEAMS(work_elements(x), team_of(x), backward_head(x, o, head, team, work))
}
