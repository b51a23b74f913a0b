/* What every slot has seen, and queries shared out by it: the totals of filter/torch/additive.py, in C.
 *
 *     s_t = a_t s_{t-1} + w_t k_t,   n_t = n0 + s_t,   y_t = q_t / n_t      entry by entry
 *
 * Heads run in parallel. Forward keeps s if backward will follow.
 */
#include "blocks.h"
#include "layout.h"

#define INPUTS(X)                                                                   \
  X(INT, T) X(INT, H) X(INT, D)                                                     \
  X(DOUBLE, resting)    /* n0, where forgetting leads */                            \
  X(READ, q) X(READ, k) /* [B,T,H,D] */                                             \
  X(READ, w) X(READ, a) /* [B,T,H] */
STRUCT(Inputs, INPUTS)

#define OUTPUTS(X)                                                                  \
  X(WRITE, s)           /* in: at the start, out: at the end; [B,H,D] */            \
  X(WRITE, y)           /* [B,T,H,D] */                                             \
  X(WRITE, sum)         /* of y, [B,T,H] */                                         \
  X(WRITE_OR_NULL, n)   /* [B,T,H,D] */                                             \
  X(WRITE_OR_NULL, saved) /* s at the start and after every token, [B,H,T+1,D] */
STRUCT(Outputs, OUTPUTS)

#define GRADIENTS(X)                                                                \
  X(READ, saved)                                                                    \
  X(READ, y) X(READ, sum) X(READ_OR_NULL, n) /* of the outputs */                   \
  X(WRITE, s)                   /* in: gradient of s at the end, out: at the start */ \
  X(WRITE, q) X(WRITE, k) X(WRITE, w) X(WRITE, log_a) /* of the inputs, every entry written */
STRUCT(Gradients, GRADIENTS)

/* Ask for a row before it is needed: rows of one head lie H*D apart, which is too far for the CPU to guess. */
INLINE void ask_for(const REAL *x, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / (int64_t)sizeof(REAL)) __builtin_prefetch(x + i);
}
#define AHEAD 12 /* tokens */

static void forward_head(const Inputs *x, const Outputs *o, int64_t head) {
  int64_t T = x->T, H = x->H, D = x->D;
  REAL *restrict s = o->s + head * D;
  const REAL resting = (REAL)x->resting;
  if (o->saved) memcpy(o->saved + head * (T + 1) * D, s, D * sizeof(REAL));
  EACH(t, T) {
    int64_t at = ((head / H) * T + t) * H + head % H;
    const REAL *restrict q = x->q + at * D, *restrict k = x->k + at * D, a = x->a[at], w = x->w[at];
    REAL *restrict y = o->y + at * D;
    int64_t later = least(AHEAD, T - 1 - t) * H * D;
    ask_for(q + later, D), ask_for(k + later, D), ask_for(y + later, D);
    REAL sum = 0;
    _Pragma("omp simd reduction(+ : sum)") EACH(i, D) {
      s[i] = a * s[i] + w * k[i];
      y[i] = q[i] / (resting + s[i]);
      sum += y[i];
    }
    o->sum[at] = sum;
    if (o->n) SIMD EACH(i, D) o->n[at * D + i] = resting + s[i];
    if (o->saved) memcpy(o->saved + (head * (T + 1) + t + 1) * D, s, D * sizeof(REAL));
  }
}

static void backward_head(const Inputs *x, const Gradients *d, int64_t head) {
  int64_t T = x->T, H = x->H, D = x->D;
  REAL *restrict ds = d->s + head * D;
  const REAL resting = (REAL)x->resting;
  for (int64_t t = T - 1; t >= 0; t--) {
    int64_t at = ((head / H) * T + t) * H + head % H;
    const REAL *restrict before = d->saved + (head * (T + 1) + t) * D, *restrict s = before + D;
    const REAL *restrict q = x->q + at * D, *restrict k = x->k + at * D, *restrict dy = d->y + at * D;
    REAL *restrict dq = d->q + at * D, *restrict dk = d->k + at * D;
    int64_t next = -least(AHEAD, t) * H * D;
    ask_for(q + next, D), ask_for(k + next, D), ask_for(dy + next, D), ask_for(dq + next, D), ask_for(dk + next, D);
    const REAL a = x->a[at], w = x->w[at], dsum = d->sum[at];
    if (d->n) add(ds, 1, d->n + at * D, D);
    REAL of_weight = 0, of_decay = 0;
    _Pragma("omp simd reduction(+ : of_weight, of_decay)") EACH(i, D) {
      REAL share = 1 / (resting + s[i]), along = (dy[i] + dsum) * share, z = ds[i] - along * q[i] * share;
      dq[i] = along;
      dk[i] = w * z;
      of_weight += k[i] * z;
      of_decay += before[i] * z;
      ds[i] = a * z;
    }
    d->w[at] = of_weight;
    d->log_a[at] = a * of_decay;
  }
}

ENTRY(forward, Inputs, x, Outputs, o) {
  OVER_HEADS(1, forward_head(x, o, head))
}

ENTRY(backward, Inputs, x, Gradients, d) {
  OVER_HEADS(1, backward_head(x, d, head))
}
