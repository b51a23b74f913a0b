/* Arguments of the dense filter in native code, token by token (kalman_token.c) or chunk by chunk (kalman_chunk.c). */
#include "layout.h"

#define INPUTS(X)                                                                      \
  X(INT, T) X(INT, H) X(INT, G) X(INT, D)                                              \
  X(INT, M)             /* value columns of one group */                               \
  X(INT, R)             /* decays of a token: 1 for all rows, D, or D/2 for pairs */   \
  X(INT, rotates)       /* whether drift turns pairs of rows */                        \
  X(INT, C)             /* tokens between two saved beliefs */                         \
  X(DOUBLE, sure)       /* see `condition` in kalman_chunk.c */                        \
  X(READ, q) X(READ, k) /* [B,T,H,D] */                                                \
  X(READ, v)            /* [B,T,H,G,M] */                                              \
  X(READ, l2)           /* [B,T,H]; l2 N enters, or l2 (I - A A') with log_a */ \
  X(READ, r2)           /* [B,T,H,G] */                                                \
  X(READ, a)            /* [B,T,H,R] */                                                \
  X(READ_OR_NULL, log_a) /* likewise; given for stationary noise */                    \
  X(READ_OR_NULL, cos)  /* of each turn, [B,T,H,D/2] */                                \
  X(READ_OR_NULL, sin)                                                                 \
  X(READ, rows)         /* diagonal of N, [D] */
STRUCT(Inputs, INPUTS)

#define OUTPUTS(X)                                                                     \
  X(WRITE, M)                /* in: belief at the start, out: at the end; [B,H,G,D,M] */ \
  X(WRITE, P)                /* likewise, [B,H,G,D,D] */                               \
  X(WRITE, o)                /* [B,T,H,G,M] */                                         \
  X(WRITE, b)                /* [B,T,H,G] */                                           \
  X(WRITE_OR_NULL, squares)  /* b |e|^2, [B,T,H,G] */                                  \
  X(WRITE_OR_NULL, variance) /* [B,T,H,G] */                                           \
  X(WRITE_OR_NULL, saved_M)  /* beliefs before tokens 0, C, … and at the end: [B,H,G,K+1,D,M] */ \
  X(WRITE_OR_NULL, saved_P)  /* likewise, [B,H,G,K+1,D,D] */
STRUCT(Outputs, OUTPUTS)

#define GRADIENTS(X)                                                                   \
  X(READ, saved_M) X(READ, saved_P)                                                    \
  X(READ, o) X(READ_OR_NULL, b) X(READ_OR_NULL, squares) X(READ_OR_NULL, variance) /* of the outputs */ \
  X(WRITE, M) X(WRITE, P)    /* in: gradient of the belief at the end, out: at the start */ \
  X(WRITE, q) X(WRITE, k) X(WRITE, v) X(WRITE, l2) X(WRITE, r2) X(WRITE, log_a) /* of the inputs, zero at first */ \
  X(WRITE_OR_NULL, angle)    /* likewise, with a rotation */
STRUCT(Gradients, GRADIENTS)

/* Say that P is not positive semi-definite at the end of a head's group: b is -1 from its last write on. */
static inline void lost(const Inputs *x, const Outputs *y, int64_t head, int64_t g) {
  for (int64_t t = x->T - 1; t >= 0; t--) {
    int64_t at = ((head / x->H) * x->T + t) * x->H + head % x->H;
    y->b[at * x->G + g] = -1;
    for (int64_t i = 0; i < x->D; i++)
      if (x->k[at * x->D + i] != 0) return;
  }
}
