/* The gains of the diagonal covariance, token by token: the formulas and letters of ops/kalman/diagonal.py, in C.
 *
 *     f = a2 p,   z = f + l2 N,                                                       u = z k
 *     f = a2 p,   z = (c2 re + s2 im, s2 re + c2 im) + l2 N,   w = c s (re - im),     u = z k + w (k of the other row)
 *     b = 1/(r2 + k'u),   p = z - b u^2
 *
 * the second line for pairs of rows (re, im) of f that turn, w being the covariance inside a pair. Rows of a rotation
 * come de-interleaved (real parts, then imaginary parts). Heads run in parallel. Forward keeps p of every token;
 * backward computes the rest anew.
 */
#include "frame.h"

typedef struct {
  int64_t T, H, G, D;
  int64_t R;                  /* decays of a token: 1 for all rows, D, or D/2 for pairs */
  int64_t rotates;            /* whether drift turns pairs of rows */
  const REAL *k, *l2, *r2;    /* [B,T,H,D], [B,T,H], [B,T,H,G] */
  const REAL *a2, *cos, *sin; /* squared decays [B,T,H,R]; [B,T,H,D/2] or NULL */
  const REAL *rows, *start;   /* diagonal of N, [D]; p before the first token, [B,H,G,D] */
} Inputs;

typedef struct {
  REAL *u, *b, *p; /* [B,T,H,G,D], [B,T,H,G], [B,T,H,G,D] */
} Outputs;

typedef struct {
  const REAL *p_t, *b_t;                    /* p and b, as forward found them */
  const REAL *u, *b, *p;                    /* gradients of the outputs */
  REAL *k, *l2, *r2, *log_a, *angle, *start; /* gradients of the inputs, zero at first; angle NULL without rotation */
} Gradients;

/* Rows that the decays of a token cover: pairs need them twice. */
INLINE int64_t covered(const Inputs *x) { return x->R == 1 ? x->D : x->R; }

/* f, z, w and u of the token `at`, from p before it. */
INLINE void predict(const Inputs *x, int64_t at, const REAL *p, REAL *restrict f, REAL *restrict z, REAL *restrict w,
                    REAL *restrict u) {
  int64_t D = x->D, half = D / 2, n = covered(x);
  const REAL *restrict k = x->k + at * D, *restrict N = x->rows, l2 = x->l2[at];
  for (int64_t i = 0; i < D; i += n) scaled(f + i, x->a2 + at * x->R, p + i, x->R, n);
  if (!x->rotates) {
    SIMD EACH(i, D) {
      z[i] = f[i] + l2 * N[i];
      u[i] = z[i] * k[i];
    }
    return;
  }
  const REAL *restrict cos = x->cos + at * half, *restrict sin = x->sin + at * half;
  SIMD EACH(i, half) {
    int64_t j = i + half;
    REAL c2 = cos[i] * cos[i], s2 = sin[i] * sin[i];
    w[i] = cos[i] * sin[i] * (f[i] - f[j]);
    z[i] = c2 * f[i] + s2 * f[j] + l2 * N[i];
    z[j] = s2 * f[i] + c2 * f[j] + l2 * N[j];
    u[i] = z[i] * k[i] + w[i] * k[j];
    u[j] = z[j] * k[j] + w[i] * k[i];
  }
}

static void forward_head(const Inputs *x, const Outputs *y, int64_t head, REAL *work) {
  int64_t T = x->T, H = x->H, G = x->G, D = x->D;
  REAL *f = work, *restrict z = f + D, *w = z + D;
  EACH(g, G) {
    const REAL *p = x->start + (head * G + g) * D;
    EACH(t, T) {
      int64_t at = ((head / H) * T + t) * H + head % H, out = at * G + g;
      REAL *restrict u = y->u + out * D, *restrict next = y->p + out * D;
      predict(x, at, p, f, z, w, u);
      const REAL b = y->b[out] = 1 / (x->r2[out] + dot(x->k + at * D, u, D));
      SIMD EACH(i, D) next[i] = z[i] - b * u[i] * u[i];
      p = next;
    }
  }
}

/* The adjoint of a turn: d holds the gradient of z, and on return of f. */
INLINE void turn_back(const Inputs *x, int64_t at, const REAL *restrict f, const REAL *restrict w,
                      const REAL *restrict du, REAL *restrict d, REAL *restrict dk, REAL *restrict dangle) {
  int64_t half = x->D / 2;
  const REAL *restrict k = x->k + at * x->D, *restrict cos = x->cos + at * half, *restrict sin = x->sin + at * half;
  SIMD EACH(i, half) {
    int64_t j = i + half;
    REAL c2 = cos[i] * cos[i], s2 = sin[i] * sin[i], cs = cos[i] * sin[i], real = d[i], imaginary = d[j];
    REAL dw = du[i] * k[j] + du[j] * k[i];
    dk[i] += w[i] * du[j];
    dk[j] += w[i] * du[i];
    dangle[i] += (f[i] - f[j]) * (2 * cs * (imaginary - real) + (c2 - s2) * dw);
    d[i] = c2 * real + s2 * imaginary + cs * dw;
    d[j] = s2 * real + c2 * imaginary - cs * dw;
  }
}

/* dp: gradient of p after all tokens, which is zero, and then of p before each of them. */
static void backward_head(const Inputs *x, const Gradients *o, int64_t head, REAL *work) {
  int64_t T = x->T, H = x->H, G = x->G, D = x->D, R = x->R, n = covered(x);
  REAL *f = work, *restrict z = f + D, *w = z + D, *restrict u = w + D, *restrict du = u + D;
  EACH(g, G) {
    REAL *restrict dp = o->start + (head * G + g) * D;
    for (int64_t t = T - 1; t >= 0; t--) {
      int64_t at = ((head / H) * T + t) * H + head % H, out = at * G + g;
      const REAL *restrict k = x->k + at * D, *restrict own = o->p + out * D, *restrict from_u = o->u + out * D;
      const REAL *restrict N = x->rows, b = o->b_t[out];
      REAL *restrict dk = o->k + at * D, db = o->b[out], dl2 = 0;
      predict(x, at, t ? o->p_t + (out - H * G) * D : x->start + (head * G + g) * D, f, z, w, u);
      _Pragma("omp simd reduction(+ : db)") EACH(i, D) {
        dp[i] += own[i];
        db -= u[i] * u[i] * dp[i];
      }
      const REAL ds = o->r2[out] = -b * b * db; /* s = r2 + k'u = 1/b */
      _Pragma("omp simd reduction(+ : dl2)") EACH(i, D) {
        du[i] = from_u[i] - 2 * b * u[i] * dp[i] + ds * k[i];
        dk[i] += ds * u[i] + z[i] * du[i];
        dp[i] += du[i] * k[i];
        dl2 += N[i] * dp[i];
      }
      o->l2[at] += dl2;
      if (x->rotates) turn_back(x, at, f, w, du, dp, dk, o->angle + at * (D / 2));
      for (int64_t i = 0; i < D; i += n) {
        gather(o->log_a + at * R, 2, f + i, dp + i, R, n);
        scaled(dp + i, x->a2 + at * R, dp + i, R, n);
      }
    }
  }
}

void forward(const Inputs *x, const Outputs *y, int64_t heads, int64_t threads) {
  OVER_HEADS(3 * x->D, forward_head(x, y, head, work))
}

void backward(const Inputs *x, const Gradients *o, int64_t heads, int64_t threads) {
  OVER_HEADS(5 * x->D, backward_head(x, o, head, work))
}
