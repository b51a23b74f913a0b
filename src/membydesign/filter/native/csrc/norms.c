/* The squared norm of every key, in one pass over the keys: torch would write their squares to memory first. */
#include "blocks.h"
#include "layout.h"

#define INPUTS(X)                         \
  X(INT, T) X(INT, D)                     \
  X(READ, k) /* [B,T,H,D] */
STRUCT(Inputs, INPUTS)

#define OUTPUTS(X) X(WRITE, squares) /* [B,T,H] */
STRUCT(Outputs, OUTPUTS)

#define GRADIENTS(X)                                  \
  X(READ, squares) /* of the output */                \
  X(WRITE, k)
STRUCT(Gradients, GRADIENTS)

/* Norms do not depend on which head a token belongs to: a head's share is the next T of B*T*H keys. */
static void forward_head(const Inputs *x, const Outputs *y, int64_t head) {
  const int64_t D = x->D, first = head * x->T;
  for (int64_t t = first; t < first + x->T; t++) y->squares[t] = dot(x->k + t * D, x->k + t * D, D);
}

static void backward_head(const Inputs *x, const Gradients *y, int64_t head) {
  const int64_t D = x->D, first = head * x->T;
  for (int64_t t = first; t < first + x->T; t++) {
    const REAL twice = 2 * y->squares[t], *restrict k = x->k + t * D;
    REAL *restrict dk = y->k + t * D;
    SIMD EACH(i, D) dk[i] = twice * k[i];
  }
}

ENTRY(forward, Inputs, x, Outputs, y) {
  _Pragma("omp parallel for num_threads(least(threads, heads))") EACH(head, heads) forward_head(x, y, head);
  return 0;
}

ENTRY(backward, Inputs, x, Gradients, y) {
  _Pragma("omp parallel for num_threads(least(threads, heads))") EACH(head, heads) backward_head(x, y, head);
  return 0;
}
