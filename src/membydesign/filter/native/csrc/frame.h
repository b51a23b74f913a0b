/* A chunk of c tokens, seen from the frame that drifts with memory since the chunk's start (see filter/torch/frame.py).
 *
 * Decays enter as products of at most c of them: f_t = a_1 … a_t, phi_ts = a_{s+1} … a_t. A matrix over pairs of tokens
 * has the earlier one, s, as its row and the later one, t, as its column: an upper triangle.
 * Tokens come with the rows of a pair as neighbours; inside, and in memories, real parts come before imaginary parts.
 */
#include "blocks.h"

#define SUB_BLOCK 16  /* tokens between two boundaries that decays of each row refer to */
#define STRONG 1e-20  /* decays over a sub-block below which quotients of them could overflow */

typedef struct {
  int64_t c, D, R;  /* tokens; rows; decays of a token: 1 for all rows, or D */
  REAL *a, *f;      /* [c,R]: the decay at each token, and from the chunk's start to it */
  REAL *phi;        /* [c,c] for R = 1: phi_ts at [t,s] */
  REAL *cos, *sin;  /* [c,D/2] of the angle since the chunk's start, or NULL */
  REAL *work;       /* [C + 2 SUB_BLOCK, D] */
  REAL *panel;      /* for products */
} Frame;

/* The next n numbers of the work space. */
INLINE REAL *take(REAL **work, int64_t n) {
  REAL *from = *work;
  *work += (n + 15) / 16 * 16;
  return from;
}

static int64_t frame_elements(int64_t C, int64_t D, int64_t widest) {
  return 4 * C * D + 2 * SUB_BLOCK * D + C * C + widest * TILE_COLUMNS + 7 * 16;
}

/* widest: the largest inner dimension of a product, at least C and D. */
static Frame frame_room(int64_t C, int64_t D, int64_t R, int rotates, int64_t widest, REAL **work) {
  Frame F = {.D = D, .R = R > 1 || rotates ? D : 1};
  F.a = take(work, C * F.R);
  F.f = take(work, C * F.R);
  F.phi = take(work, C * C);
  F.cos = rotates ? take(work, C * D / 2) : NULL;
  F.sin = rotates ? take(work, C * D / 2) : NULL;
  F.work = take(work, (C + 2 * SUB_BLOCK) * D);
  F.panel = take(work, widest * TILE_COLUMNS);
  return F;
}

/* Decays a, and cos and sin of each token's own turn, of c tokens that lie `stride` tokens apart; R of them each. */
static void frame_of(Frame *F, int64_t c, const REAL *a, const REAL *cos, const REAL *sin, int64_t R, int64_t stride) {
  int64_t half = F->D / 2;
  F->c = c;
  EACH(t, c) {
    REAL *at = F->a + t * F->R, *f = F->f + t * F->R;
    memcpy(at, a + t * stride * R, R * sizeof(REAL));
    if (R < F->R) memcpy(at + R, at, R * sizeof(REAL)); /* both rows of a pair */
    EACH(i, F->R) f[i] = t ? f[i - F->R] * at[i] : at[i];
    if (F->R == 1) {
      REAL *phi = F->phi + t * c;
      memset(phi + t, 0, (c - t) * sizeof(REAL));
      SIMD EACH(s, t) phi[s] = phi[s - c] * at[0];
      phi[t] = 1;
    }
    if (F->cos) {
      const REAL *x = cos + t * stride * half, *y = sin + t * stride * half;
      REAL *C = F->cos + t * half, *S = F->sin + t * half;
      EACH(i, half) {
        REAL u = t ? C[i - half] : 1, v = t ? S[i - half] : 0;
        C[i] = u * x[i] - v * y[i];
        S[i] = v * x[i] + u * y[i];
      }
    }
  }
}

/* y = f x, row by row; f has R entries; y may be x. */
INLINE void scaled(REAL *y, const REAL *f, const REAL *x, int64_t R, int64_t D) {
  if (R == 1) {
    const REAL c = f[0];
    SIMD EACH(i, D) y[i] = c * x[i];
  } else {
    SIMD EACH(i, D) y[i] = f[i] * x[i];
  }
}

/* total += x y, for each of R rows or summed over all of them. */
INLINE void gather(REAL *restrict total, REAL sign, const REAL *restrict x, const REAL *restrict y, int64_t R, int64_t D) {
  if (R == 1) {
    total[0] += sign * dot(x, y, D);
  } else {
    SIMD EACH(i, D) total[i] += sign * x[i] * y[i];
  }
}

/* Turn x [D] by the angle at token t, forwards (sign 1) or backwards (-1). */
INLINE void turn_token(const Frame *F, REAL *restrict x, int64_t t, REAL sign) {
  int64_t half = F->D / 2;
  const REAL *restrict c = F->cos + t * half, *restrict s = F->sin + t * half;
  REAL *restrict y = x + half;
  SIMD EACH(i, half) {
    REAL real = x[i], imaginary = y[i];
    x[i] = c[i] * real - sign * s[i] * imaginary;
    y[i] = sign * s[i] * real + c[i] * imaginary;
  }
}

/* Tokens x, which lie `stride` numbers apart, into the frame: to [c,D]. */
static void enter(const Frame *F, REAL *to, const REAL *x, int64_t stride) {
  int64_t D = F->D, half = D / 2;
  EACH(t, F->c) {
    const REAL *restrict from = x + t * stride;
    REAL *restrict y = to + t * D;
    if (F->cos) {
      SIMD EACH(i, half) y[i] = from[2 * i], y[i + half] = from[2 * i + 1];
      turn_token(F, y, t, -1);
    } else {
      memcpy(y, from, D * sizeof(REAL));
    }
  }
}

/* The adjoint: dx += gradients dy [c,D] of entered tokens y, turned back (in place); angle [c,D/2] gathers d(Theta_t). */
static void enter_back(const Frame *F, const REAL *y, REAL *dy, REAL *dx, int64_t stride, REAL *angle) {
  int64_t D = F->D, half = D / 2;
  EACH(t, F->c) {
    const REAL *restrict x = y + t * D;
    REAL *restrict d = dy + t * D, *restrict to = dx + t * stride;
    if (F->cos) {
      REAL *restrict turned = angle + t * half;
      SIMD EACH(i, half) turned[i] -= d[i + half] * x[i] - d[i] * x[i + half];
      turn_token(F, d, t, 1);
      SIMD EACH(i, half) to[2 * i] += d[i], to[2 * i + 1] += d[i + half];
    } else {
      SIMD EACH(i, D) to[i] += d[i];
    }
  }
}

/* p_t = a_start … a_t for the tokens of a sub-block. Returns whether quotients of them are safe: each is exact to a few
 * roundings, but must not overflow. */
static int block_decays(const Frame *F, int64_t start, int64_t end, REAL *p) {
  int64_t D = F->D;
  memcpy(p, F->a + start * D, D * sizeof(REAL));
  for (int64_t t = start + 1; t < end; t++) scaled(p + (t - start) * D, F->a + t * D, p + (t - start - 1) * D, D, D);
  REAL weakest = 1;
  const REAL *last = p + (end - start - 1) * D;
  EACH(i, D) weakest = last[i] < weakest ? last[i] : weakest;
  return weakest > STRONG;
}

/* y / p, row by row; to may be y. */
INLINE void divided(REAL *to, const REAL *y, const REAL *p, int64_t n) { SIMD EACH(i, n) to[i] = y[i] / p[i]; }

/* S_st = sum_i x_ti phi_ts,i y_si for two x (the second may be NULL), and exits_s = phi_Cs y_s.
 *
 * With a decay of each row, sub-block by sub-block: `exits` holds what has become of earlier y at the boundary before it,
 * and the sub-block's own y divided by their decays since; if that is not safe, its own are taken one by one. */
static void decayed_products(const Frame *F, const REAL *x1, const REAL *x2, const REAL *y, REAL *S1, REAL *S2,
                             REAL *exits) {
  int64_t c = F->c, D = F->D;
  const REAL *x[2] = {x1, x2};
  REAL *S[2] = {S1, S2};
  int each = x2 ? 2 : 1;
  if (F->R == 1) {
    EACH(h, each) product(c, c, D, view(y, D), transposed(x[h], D), S[h], c, SET_UPPER, F->panel);
    EACH(s, c) {
      EACH(h, each) {
        memset(S[h] + s * c, 0, s * sizeof(REAL));
        for (int64_t t = s; t < c; t++) S[h][s * c + t] *= F->phi[t * c + s];
      }
      scaled(exits + s * D, F->phi + (c - 1) * c + s, y + s * D, 1, D);
    }
    return;
  }
  REAL *p = F->work, *faded = p + SUB_BLOCK * D;
  for (int64_t start = 0; start < c; start += SUB_BLOCK) {
    int64_t end = least(start + SUB_BLOCK, c), n = end - start;
    int safe = block_decays(F, start, end, p);
    int64_t known = safe ? end : start;
    if (safe) divided(exits + start * D, y + start * D, p, n * D);
    EACH(h, each) {
      scaled(faded, p, x[h] + start * D, n * D, n * D);
      if (known) product(known, n, D, view(exits, D), transposed(faded, D), S[h] + start, c, SET, F->panel);
      for (int64_t s = start; s < c; s++) memset(S[h] + s * c + start, 0, least(s - start, n) * sizeof(REAL));
    }
    EACH(s, known) scaled(exits + s * D, p + (n - 1) * D, exits + s * D, D, D);
    for (int64_t s = known; s < end; s++) {
      REAL *w = exits + s * D;
      memcpy(w, y + s * D, D * sizeof(REAL));
      for (int64_t t = s; t < end; t++) {
        if (t > s) scaled(w, F->a + t * D, w, D, D);
        EACH(h, each) S[h][s * c + t] = dot(x[h] + t * D, w, D);
      }
    }
  }
}

/* The adjoint, given dS1, dS2 (upper triangles, zero below) and dexits: dx1 and dx2 are added to, dy is set.
 * The gradient of log a_t is end + sum over later tokens (t included) of net; both gather their parts. */
static void decayed_products_back(const Frame *F, const REAL *x1, const REAL *x2, const REAL *y, const REAL *S1,
                                  const REAL *S2, const REAL *exits, REAL *dS1, REAL *dS2, const REAL *dexits,
                                  REAL *dx1, REAL *dx2, REAL *dy, REAL *net, REAL *end_of) {
  int64_t c = F->c, D = F->D;
  const REAL *x[2] = {x1, x2}, *S[2] = {S1, S2};
  REAL *dS[2] = {dS1, dS2}, *dx[2] = {dx1, dx2};
  int each = x2 ? 2 : 1;
  EACH(s, c) gather(end_of, 1, exits + s * D, dexits + s * D, F->R, D);
  if (F->R == 1) {
    EACH(s, c) {
      net[s] -= dot(exits + s * D, dexits + s * D, D);
      scaled(dy + s * D, F->phi + (c - 1) * c + s, dexits + s * D, 1, D);
      EACH(h, each) for (int64_t t = s; t < c; t++) {
        REAL part = dS[h][s * c + t] * S[h][s * c + t];
        net[t] += part;
        net[s] -= part;
        dS[h][s * c + t] *= F->phi[t * c + s];
      }
    }
    EACH(h, each) {
      product(c, D, c, view(dS[h], c), view(x[h], D), dy, D, ADD, F->panel);
      product(c, D, c, transposed(dS[h], c), view(y, D), dx[h], D, ADD, F->panel);
    }
    return;
  }
  REAL *p = F->work, *part = p + SUB_BLOCK * D, *seen = part + SUB_BLOCK * D;
  for (int64_t start = 0; start < c; start += SUB_BLOCK) { /* dx, with y faded to each boundary in turn */
    int64_t end = least(start + SUB_BLOCK, c), n = end - start;
    int safe = block_decays(F, start, end, p);
    int64_t known = safe ? end : start;
    if (safe) divided(seen + start * D, y + start * D, p, n * D);
    EACH(h, each) {
      if (known) product(n, D, known, transposed(dS[h] + start, c), view(seen, D), part, D, SET, F->panel);
      else memset(part, 0, n * D * sizeof(REAL));
      scaled(part, p, part, n * D, n * D);
      for (int64_t s = known; s < end; s++) {
        REAL *w = seen + s * D;
        memcpy(w, y + s * D, D * sizeof(REAL));
        for (int64_t t = s; t < end; t++) {
          if (t > s) scaled(w, F->a + t * D, w, D, D);
          add(part + (t - start) * D, dS[h][s * c + t], w, D);
        }
      }
      add(dx[h] + start * D, 1, part, n * D);
      gather(net + start * D, 1, x[h] + start * D, part, n * D, n * D);
    }
    EACH(s, known) scaled(seen + s * D, p + (n - 1) * D, seen + s * D, D, D);
  }
  memcpy(dy, dexits, c * D * sizeof(REAL)); /* dy, with the gradient of y faded to each boundary in turn */
  for (int64_t start = (c - 1) / SUB_BLOCK * SUB_BLOCK; start >= 0; start -= SUB_BLOCK) {
    int64_t end = least(start + SUB_BLOCK, c), n = end - start;
    int safe = block_decays(F, start, end, p);
    int64_t known = safe ? end : start;
    for (int64_t s = known; s < end; s++) {
      REAL *d = dy + s * D;
      for (int64_t t = end - 1; t >= s; t--) {
        EACH(h, each) add(d, dS[h][s * c + t], x[h] + t * D, D);
        if (t > s) scaled(d, F->a + t * D, d, D, D);
      }
    }
    EACH(s, known) scaled(dy + s * D, p + (n - 1) * D, dy + s * D, D, D);
    EACH(h, each) {
      scaled(part, p, x[h] + start * D, n * D, n * D);
      if (known) product(known, D, n, view(dS[h] + start, c), view(part, D), dy, D, ADD, F->panel);
    }
    if (safe) divided(dy + start * D, dy + start * D, p, n * D);
  }
  EACH(s, c) gather(net + s * D, -1, y + s * D, dy + s * D, D, D);
}

/* Turn the rows of M [D,n], `ld` apart, by the angle at the chunk's end, forwards (sign 1) or backwards (-1). */
static void turn_memory(const Frame *F, REAL *M, int64_t n, int64_t ld, REAL sign) {
  int64_t half = F->D / 2;
  const REAL *c = F->cos + (F->c - 1) * half, *s = F->sin + (F->c - 1) * half;
  EACH(i, half) {
    REAL *restrict x = M + i * ld, *restrict y = M + (i + half) * ld, r = c[i], v = sign * s[i];
    SIMD EACH(j, n) {
      REAL real = x[j], imaginary = y[j];
      x[j] = r * real - v * imaginary;
      y[j] = v * real + r * imaginary;
    }
  }
}

/* The same for both sides of P [D,D]. */
static void turn_covariance(const Frame *F, REAL *P, REAL sign) {
  turn_memory(F, P, F->D, F->D, sign);
  EACH(i, F->D) turn_token(F, P + i * F->D, F->c - 1, sign);
}

/* angle += weight d(Theta) of what was turned into x [D,m], given the gradient dx. */
static void turn_angle(const Frame *F, REAL *angle, REAL weight, const REAL *x, const REAL *dx, int64_t m) {
  int64_t half = F->D / 2;
  EACH(i, half) {
    int64_t h = (i + half) * m;
    angle[i] += weight * (dot(dx + h, x + i * m, m) - dot(dx + i * m, x + h, m));
  }
}

/* Gradients of each token's log decay and turn, from what net, end and angle gathered: sums over all later tokens.
 * R is the number of decays a token was given: 1, D, or D/2 for pairs. */
static void drift_back(const Frame *F, REAL *net, const REAL *end_of, REAL *angle, REAL *log_a, REAL *turn, int64_t R,
                       int64_t stride) {
  int64_t half = F->D / 2;
  for (int64_t t = F->c - 1; t >= 0; t--) {
    REAL *here = net + t * F->R;
    const REAL *later = t + 1 < F->c ? here + F->R : end_of;
    EACH(i, F->R) here[i] += later[i];
    REAL *restrict to = log_a + t * stride * R;
    for (int64_t i = 0; i < F->R; i += R) add(to, 1, here + i, R);
    if (!F->cos) continue;
    REAL *turned = angle + t * half;
    if (t + 1 < F->c) EACH(i, half) turned[i] += turned[i + half];
    EACH(i, half) turn[t * stride * half + i] += turned[i];
  }
}
