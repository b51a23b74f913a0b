/* Arguments of the dense filter in native code, token by token (kalman_token.c) or chunk by chunk (kalman_chunk.c). */
typedef struct {
  int64_t T, H, G, D, M;      /* M: value columns of one group */
  int64_t R;                  /* decays of a token: 1 for all rows, D, or D/2 for pairs */
  int64_t rotates, C;         /* whether drift turns pairs of rows; tokens between two saved beliefs */
  const REAL *q, *k, *v;      /* [B,T,H,D], [B,T,H,D], [B,T,H,G,M] */
  const REAL *l2, *r2;        /* [B,T,H], [B,T,H,G] */
  const REAL *a, *cos, *sin;  /* [B,T,H,R]; of each turn, [B,T,H,D/2] or NULL */
  const REAL *rows;           /* diagonal of N, [D] */
} Inputs;

typedef struct {
  REAL *M, *P;                /* in: belief at the start, out: at the end; [B,H,G,D,M], [B,H,G,D,D] */
  REAL *o, *b, *e, *variance; /* [B,T,H,G,M], [B,T,H,G], [B,T,H,G,M] or NULL, [B,T,H,G] or NULL */
  REAL *saved_M, *saved_P;    /* beliefs before tokens 0, C, … and at the end: [B,H,G,K+1,D,M], [B,H,G,K+1,D,D], or NULL */
} Outputs;

typedef struct {
  const REAL *saved_M, *saved_P;
  const REAL *o, *b, *e, *variance;          /* gradients of the outputs; all but o may be NULL */
  REAL *M, *P;                               /* in: gradient of the belief at the end, out: at the start */
  REAL *q, *k, *v, *l2, *r2, *log_a, *angle; /* gradients of the inputs, zero at first; angle NULL without rotation */
} Gradients;
