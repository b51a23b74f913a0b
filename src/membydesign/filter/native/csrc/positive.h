/* Covariances that stay positive: the variance of a row that a sure write resolves, and a look at a whole matrix.
 * Include it after blocks.h. */
#ifndef POSITIVE_H
#define POSITIVE_H
#include <float.h>

#define EPSILON (sizeof(REAL) == sizeof(float) ? (REAL)FLT_EPSILON : (REAL)DBL_EPSILON)
#define SMALLEST (sizeof(REAL) == sizeof(float) ? (REAL)FLT_MIN : (REAL)DBL_MIN)

/* A row that keeps less than this part of its variance z is not computed as z - b u^2, a difference of almost equal
 * numbers, but by `resolved`; RESOLVED of design/diagonal.py. */
#define RESOLVED ((REAL)1 / 16)

/* The variance z given one observation of noise d at the key g: 1/(1/z + g^2/d). */
INLINE REAL resolved(REAL z, REAL g, REAL d) { return d / (d / z + g * g); }

/* Whether P [D,D] has a negative eigenvalue beyond half of the rounding that `Dense.flaws` tolerates, so that what
 * passes here passes there. `room` holds D * (D + TILE_COLUMNS) numbers. What is not a number is no flaw here. */
static inline int indefinite(const REAL *P, int64_t D, REAL *room) {
  REAL scale = SMALLEST;
  EACH(i, D) scale = fabs(P[i * D + i]) > scale ? fabs(P[i * D + i]) : scale;
  memcpy(room, P, D * D * sizeof(REAL));
  EACH(i, D) room[i * D + i] += 4 * (D > 8 ? D : 8) * EPSILON * scale;
  return cholesky(room, D, room + D * D) >= 0;
}

/* 1 - a^2 for y = 2 log a: the part of l2 that stationary noise puts in the place of what a decay takes. A series where
 * the difference would cancel, which vectors compute as well; expm1 takes them one by one. */
INLINE REAL replaced(REAL y, REAL a2) {
  REAL series = 1;
  for (int n = sizeof(REAL) == sizeof(float) ? 9 : 17; n > 1; n--) series = 1 + y * ((REAL)1 / n) * series;
  return y > (REAL)-0.5 ? -y * series : 1 - a2;
}
#endif
