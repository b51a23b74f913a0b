/* The adjoint of gains.c, which includes it. d… is the gradient of …; dG and dP are those of symmetric matrices. */

typedef struct {
  REAL *k, *q, *kt, *qt, *U, *J, *X, *Y, *noisy;  /* [n,D]; X is zero */
  REAL *noise, *net, *angle, *end;                /* [n,R], [n,R], [n,D/2], [R]: see frame.h */
  REAL *R, *G, *W, *kk, *qk, *other;              /* [n,n] */
  REAL *log_a;                                    /* [n,R]: of each token's own sqrt(s) a */
  REAL *half;                                     /* [2n,D] */
} Back;

static int64_t back_elements(const Inputs *x) { return PIECE * (15 * x->D + 6 * PIECE) + x->D + 20 * 16; }

static Back back_room(const Inputs *x, REAL **work) {
  int64_t D = x->D, n = PIECE;
  Back d;
  REAL **rows[] = {&d.k,   &d.q,     &d.kt,  &d.qt,    &d.U,     &d.J,    &d.X,  &d.Y,
                   &d.noisy, &d.noise, &d.net, &d.angle, &d.log_a, &d.half};
  REAL **pairs[] = {&d.R, &d.G, &d.W, &d.kk, &d.qk, &d.other};
  EACH(i, 14) *rows[i] = take(work, (i == 13 ? 2 : 1) * n * D);
  EACH(i, 6) *pairs[i] = take(work, n * n);
  d.end = take(work, D);
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

/* Through `resolve`: J receives its gradient, given dY, that of each token's write, and R adds its own. */
static void resolve_back(const Room *m, const Piece *y, Back *d) {
  int64_t n = y->n, D = y->F.D, R = y->F.R;
  EACH(t, n) gather(d->net + t * R, 1, y->Y + t * D, d->Y + t * D, R, D);
  if (y->safe) {
    EACH(t, n) scaled(d->J + t * D, y->p + t * R, d->Y + t * D, R, D);
    solve_back(y->R, n, d->J, D, D, m->panel);
    product(n, n, D, view(y->Z, D), transposed(d->J, D), d->other, n, SET_UPPER, m->panel);
    EACH(u, n) add(d->R + u * n + u, -1, d->other + u * n + u, n - u);
    EACH(t, n) unscaled(d->J + t * D, y->p + t * R, d->J + t * D, R, D);
  } else {
    REAL *later = d->half; /* the gradients of later J, faded back to this token */
    for (int64_t t = n - 1; t >= 0; t--) {
      REAL *here = d->J + t * D, scale = 1 / y->R[t * n + t];
      memcpy(here, d->Y + t * D, D * sizeof(REAL));
      for (int64_t u = t + 1; u < n; u++) {
        scaled(later + u * D, y->F.a + (t + 1) * R, later + u * D, R, D);
        add(here, -y->R[t * n + u], later + u * D, D);
        d->R[t * n + u] -= dot(y->Y + t * D, later + u * D, D);
      }
      scaled(here, &scale, here, 1, D);
      memcpy(later + t * D, here, D * sizeof(REAL));
      d->R[t * n + t] -= dot(y->Y + t * D, here, D);
    }
  }
  EACH(t, n) gather(d->net + t * R, -1, y->J + t * D, d->J + t * D, R, D);
}

/* The gradient of a token's log decays, given that of all rows. */
INLINE void add_decays(const Inputs *x, const Gradients *o, int64_t at, const REAL *rows) {
  add(o->log_a + at * x->R, 1, rows, x->R);
  if (x->rotates) add(o->log_a + at * x->R, 1, rows + x->R, x->R);
}

/* Noise built up, from the last token to the first, and what entered it. */
static void noise_back(const Inputs *x, const Gradients *o, const Room *m, const Piece *y, Back *d) {
  int64_t R = y->F.R;
  for (int64_t t = y->n - 1; t >= 0; t--) {
    int64_t at = y->first + t * x->H;
    const REAL *own = y->F.a + t * R, *before = y->noise + (t - 1) * R, *a = decays(x, at, m->row);
    REAL *dn = d->noise + t * R, s = x->s[at];
    REAL *restrict log_a = d->log_a + t * R;
    if (t) SIMD EACH(i, R) {
      log_a[i] += 2 * own[i] * own[i] * before[i] * dn[i];
      dn[i - R] += own[i] * own[i] * dn[i];
    }
    if (!x->lam || (t == 0 && y->entered)) continue;
    REAL lam = x->lam[at], dlam = 0, ds = 0;
    _Pragma("omp simd reduction(+ : dlam, ds)") EACH(i, R) {
      REAL part = a[i] * a[i] * dn[i];
      dlam += dn[i] - s * part;
      ds -= lam * part;
      dn[i] = -2 * lam * s * part; /* of log a from here on */
    }
    add_decays(x, o, at, dn);
    o->lam[at] += dlam;
    o->s[at] += ds;
  }
}

/* Through P0 = s A P A' + lam (I - s A A') of the first token: dP0, in place. */
static void enter_piece_back(const Inputs *x, const Gradients *o, const Room *m, const Piece *y, Back *d, REAL *dP) {
  int64_t D = x->D, R = y->F.R, at = y->first;
  const REAL *a = decays(x, at, m->row), s = x->s[at], lam = x->lam ? x->lam[at] : 0;
  REAL ds = 0, dlam = 0, *log_a = d->end;
  memset(log_a, 0, R * sizeof(REAL));
  EACH(i, D) {
    const REAL *P = y->P + i * D;
    REAL *row = dP + i * D, ai = a[R == 1 ? 0 : i], own = row[i], total = 0;
    scaled(row, a, row, R, D);
    scaled(row, &ai, row, 1, D);
    total = dot(row, P, D);
    scaled(row, &s, row, 1, D);
    ds += total - lam * ai * ai * own;
    dlam += forgotten(s, ai) * own;
    log_a[R == 1 ? 0 : i] += 2 * s * (total - lam * ai * ai * own);
  }
  add_decays(x, o, at, log_a);
  o->s[at] += ds;
  if (o->lam) o->lam[at] += dlam;
}

/* The adjoint of one piece. dP: gradient of the covariance after it, `after`, and on return of that before it. */
static void piece_back(const Inputs *x, const Gradients *o, const Room *m, const Piece *y, const REAL *P0,
                       const REAL *after, Back *d, REAL *dP, int64_t g) {
  int64_t n = y->n, D = x->D, half = D / 2, H = x->H, R = y->F.R, step = H * x->G, at = y->first * x->G + g;
  const Frame *F = &y->F;
  const REAL *end = F->f + (n - 1) * R;
  const Into half_upper = {0.5, 1, 1}, minus_twice = {-2, 0, 0};
  REAL *panel = m->panel;
  memset(d->noise, 0, n * R * sizeof(REAL)), memset(d->net, 0, n * R * sizeof(REAL));
  memset(d->angle, 0, n * half * sizeof(REAL)), memset(d->end, 0, R * sizeof(REAL));
  memset(d->log_a, 0, n * R * sizeof(REAL));
  memset(d->R, 0, n * n * sizeof(REAL)), memset(d->kk, 0, n * n * sizeof(REAL)), memset(d->qk, 0, n * n * sizeof(REAL));
  memset(d->k, 0, n * D * sizeof(REAL)), memset(d->q, 0, n * D * sizeof(REAL)), memset(d->X, 0, n * D * sizeof(REAL));

  /* P = f P0 f + noise - X'X, and X from Y */
  if (x->rotates) {
    turn_angle(F, d->angle + (n - 1) * half, 2, after, dP, D);
    turn_covariance(F, dP, -1);
  }
  product(n, D, D, view(y->X, D), view(dP, D), d->Y, D, minus_twice, panel);
  EACH(i, D) d->noise[(n - 1) * R + (R == 1 ? 0 : i)] += dP[i * D + i];
  EACH(t, n) {
    gather(d->end, 1, y->X + t * D, d->Y + t * D, R, D);
    gather(d->net + t * R, -1, y->X + t * D, d->Y + t * D, R, D);
  }
  fade(dP, dP, end, R, D);
  mirror(dP, D);
  EACH(i, D) d->end[R == 1 ? 0 : i] += 2 * dot(dP + i * D, P0 + i * D, D);

  /* u = R_tt Y and b; `faded` is the decay from t to the end, which quotients of p may not give */
  REAL *du = d->half, *faded = d->half + D;
  EACH(i, R) faded[i] = 1;
  for (int64_t t = n - 1; t >= 0; t--) {
    const REAL *own = o->u + (at + t * step) * D;
    REAL pivot = y->R[t * n + t], *dY = d->Y + t * D;
    if (t + 1 < n) EACH(i, R) faded[i] *= F->a[(t + 1) * R + i];
    scaled(dY, faded, dY, R, D);
    if (F->cos) { /* into the frame; Theta moves u = R(Theta) x */
      EACH(i, half) du[i] = own[2 * i], du[i + half] = own[2 * i + 1];
      turn_token(F, du, t, -1);
      const REAL *v = y->Y + t * D;
      EACH(i, half) d->angle[t * half + i] += pivot * (du[i + half] * v[i] - du[i] * v[i + half]);
    } else {
      memcpy(du, own, D * sizeof(REAL));
    }
    d->R[t * n + t] += dot(du, y->Y + t * D, D);
    if (o->b) d->R[t * n + t] -= 2 * o->b[at + t * step] / (pivot * pivot * pivot);
    add(dY, pivot, du, D);
  }
  resolve_back(m, y, d); /* d->J, and more of d->R */
  EACH(t, n) {
    const REAL *f = F->f + t * R;
    REAL *dU = d->U + t * D;
    scaled(dU, f, d->J + t * D, R, D);
    gather(d->net + t * R, 1, y->U + t * D, dU, R, D);
  }

  /* variance = qt P0 qt + q noise q - W'W */
  if (o->variance) {
    EACH(u, n) EACH(t, n) d->W[u * n + t] = t < u ? 0 : -2 * o->variance[at + t * step] * y->W[u * n + t];
    solve_back(y->R, n, d->W, n, n, panel);
    product(n, n, n, view(y->W, n), transposed(d->W, n), d->other, n, SET_UPPER, panel);
    EACH(u, n) {
      add(d->R + u * n + u, -1, d->other + u * n + u, n - u);
      memset(d->W + u * n, 0, u * sizeof(REAL)); /* of H, whose upper triangle alone is used */
      memcpy(d->qk + u * n + u, d->W + u * n + u, (n - u) * sizeof(REAL));
    }
    product(n, D, n, view(d->W, n), view(y->qt, D), d->U, D, ADD, panel);
    product(n, D, n, transposed(d->W, n), view(y->U, D), d->qt, D, SET, panel);
  }

  /* R, then G */
  EACH(u, n) memset(d->R + u * n, 0, u * sizeof(REAL));
  cholesky_back(y->R, d->R, d->G, d->other, n, panel);
  EACH(u, n) {
    o->r2[at + u * step] = d->G[u * n + u];
    d->kk[u * n + u] = d->G[u * n + u];
    for (int64_t t = u + 1; t < n; t++) d->kk[u * n + t] = d->G[u * n + t] + d->G[t * n + u];
  }

  /* U, kt and P0 */
  product(n, D, n, view(d->G, n), view(y->kt, D), d->half, D, SET, panel);
  EACH(i, n * D) d->U[i] += d->half[i], d->half[i] += d->U[i];
  product(n, D, D, view(d->half, D), view(P0, D), d->kt, D, SET, panel);
  product(D, D, n, transposed(y->kt, D), view(d->U, D), dP, D, half_upper, panel);
  product(D, D, n, transposed(d->U, D), view(y->kt, D), dP, D, half_upper, panel);
  if (o->variance) {
    EACH(t, n) scaled(d->half + t * D, o->variance + at + t * step, y->qt + t * D, 1, D);
    product(D, D, n, transposed(d->half, D), view(y->qt, D), dP, D, (Into){1, 1, 1}, panel);
    product(n, D, D, view(d->half, D), view(P0, D), d->qt, D, (Into){2, 1, 0}, panel);
  }
  mirror(dP, D);

  /* keys and queries, noise, decays */
  decayed_products_back(F, y->k, y->q, y->noisy, y->kk, y->qk, y->X, d->kk, d->qk, d->X, d->k, d->q, d->noisy, d->net,
                        d->end); /* d->X is zero: nothing reads what the noise is at the end but P */
  REAL *row = d->half;
  EACH(t, n) {
    const REAL *f = F->f + t * R, *noise = y->noise + t * R, *k = y->k + t * D, *q = y->q + t * D;
    REAL *dk = d->k + t * D, *dq = d->q + t * D, *dnoisy = d->noisy + t * D, *dn = d->noise + t * R;
    add(dnoisy, 1, d->J + t * D, D);
    gather(d->net + t * R, 1, y->kt + t * D, d->kt + t * D, R, D);
    scaled(row, f, d->kt + t * D, R, D), add(dk, 1, row, D);
    scaled(row, noise, dnoisy, R, D), add(dk, 1, row, D);
    gather(dn, 1, k, dnoisy, R, D);
    if (!o->variance) continue;
    REAL weight = o->variance[at + t * step];
    gather(d->net + t * R, 1, y->qt + t * D, d->qt + t * D, R, D);
    scaled(row, f, d->qt + t * D, R, D), add(dq, 1, row, D);
    scaled(row, noise, q, R, D), add(dq, 2 * weight, row, D);
    gather(dn, weight, q, q, R, D);
  }
  noise_back(x, o, m, y, d);
  enter_back(F, y->k, d->k, o->k + y->first * D, H * D, d->angle);
  if (o->variance) enter_back(F, y->q, d->q, o->q + y->first * D, H * D, d->angle);
  for (int64_t t = n - 1; t >= 0; t--) { /* sums over later tokens, see frame.h */
    int64_t token = y->first + t * H;
    REAL *later = d->net + t * R, *log_a = d->log_a + t * R, *turned = d->angle + t * half, total = 0;
    add(later, 1, t + 1 < n ? later + R : d->end, R);
    if (x->rotates) {
      if (t + 1 < n) add(turned, 1, turned + half, half);
      add(o->angle + token * half, 1, turned, half);
    }
    if (t == 0 && y->entered) continue;
    add(log_a, 1, later, R);
    add_decays(x, o, token, log_a);
    EACH(i, R) total += log_a[i];
    o->s[token] += total / (2 * x->s[token]);
  }
  if (y->entered) enter_piece_back(x, o, m, y, d, dP);
}

static void backward_head(const Inputs *x, const Gradients *o, int64_t head, REAL *work) {
  int64_t T = x->T, H = x->H, G = x->G, D = x->D, C = x->C, K = (T + C - 1) / C;
  Room m = room_of(x, &work);
  Back d = back_room(x, &work);
  REAL *starts = take(&work, (C + 1) * D * D), *entered = take(&work, C * D * D); /* P before every piece */
  Piece *pieces = (Piece *)take(&work, C * (int64_t)(sizeof(Piece) / sizeof(REAL)));
  EACH(g, G) {
    int64_t group = head * G + g;
    for (int64_t i = K - 1; i >= 0; i--) {
      int64_t end = least(T, (i + 1) * C), tokens = x->piece, count = 0;
      const REAL *saved = o->saved + (group * (K + 1) + i) * D * D;
      REAL *own = work, *P0 = entered;
      memcpy(starts, saved, D * D * sizeof(REAL));
      for (int64_t t = i * C; t < end; t += pieces[count++].n) {
        Piece *y = pieces + count;
        REAL *P = starts + count * D * D;
        next_piece(x, &m, y, P, P0, ((head / H) * T + t) * H + head % H, end - t, g, &tokens, &own);
        leave_piece(x, &m, y, y->entered ? P0 : P, P + D * D);
        P0 += y->entered ? D * D : 0;
      }
      while (count--) {
        const Piece *y = pieces + count;
        if (y->entered) P0 -= D * D;
        piece_back(x, o, &m, y, y->entered ? P0 : y->P, y->P + D * D, &d, o->P + group * D * D, g);
      }
    }
  }
}

ENTRY(backward, Inputs, x, Gradients, o) {
  int64_t D = x->D, C = x->C, pieces = C * (int64_t)(sizeof(Piece) / sizeof(REAL));
  OVER_HEADS(room_elements(x) + back_elements(x) + (2 * C + 1) * D * D + pieces + 48 + piece_elements(x, C + PIECE),
             backward_head(x, o, head, work))
}
