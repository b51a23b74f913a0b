/* What a decoding step makes of a covariance, for step.c: A P A' - b u u' for a matrix and for a diagonal, and whether
 * rounding has left it indefinite. In the letters of step.c; include it after blocks.h and positive.h. */
#if defined(__FP_FAST_FMA) && defined(__FP_FAST_FMAF) /* said outright, the same entry above and below the diagonal */
#define SUBTRACTED(z, x, y) fma(-(x), y, z)
#else
#define SUBTRACTED(z, x, y) ((z) - (x) * (y))
#endif

/* to = A P A' - b u u', symmetric to the last bit if P is. Returns its sum, to see whether it is finite. */
INLINE REAL write_P(REAL *restrict to, const REAL *restrict P, const REAL *restrict c, const REAL *restrict u, REAL b,
                    int64_t D) {
  REAL sum = 0;
  int64_t i = 0;
  for (; i + 2 <= D; i += 2) {
    const REAL *restrict p0 = P + i * D, *restrict p1 = p0 + D;
    REAL *restrict t0 = to + i * D, *restrict t1 = t0 + D;
    const REAL c0 = c[i], c1 = c[i + 1], u0 = u[i], u1 = u[i + 1];
    _Pragma("omp simd reduction(+ : sum)") EACH(j, D) {
      REAL z0 = SUBTRACTED((c0 * c[j]) * p0[j], b, u0 * u[j]), z1 = SUBTRACTED((c1 * c[j]) * p1[j], b, u1 * u[j]);
      t0[j] = z0, t1[j] = z1;
      sum += z0 + z1;
    }
  }
  if (i < D) {
    _Pragma("omp simd reduction(+ : sum)") EACH(j, D) {
      REAL z = SUBTRACTED((c[i] * c[j]) * P[i * D + j], b, u[i] * u[j]);
      to[i * D + j] = z;
      sum += z;
    }
  }
  return sum;
}

/* The same where pairs turn: rows, then columns, then the mean of what lies above and below the diagonal. */
static REAL turn_P(REAL *to, const REAL *P, const REAL *c, const REAL *s, const REAL *u, REAL b, int64_t D) {
  EACH(i, D / 2) {
    const REAL *restrict p0 = P + 2 * i * D, *restrict p1 = p0 + D;
    REAL *restrict t0 = to + 2 * i * D, *restrict t1 = t0 + D;
    const REAL cos = c[i], sin = s[i];
    SIMD EACH(j, D) {
      t0[j] = cos * p0[j] - sin * p1[j];
      t1[j] = sin * p0[j] + cos * p1[j];
    }
    EACH(j, D / 2) {
      REAL a0 = t0[2 * j], a1 = t0[2 * j + 1], b0 = t1[2 * j], b1 = t1[2 * j + 1];
      t0[2 * j] = c[j] * a0 - s[j] * a1, t0[2 * j + 1] = s[j] * a0 + c[j] * a1;
      t1[2 * j] = c[j] * b0 - s[j] * b1, t1[2 * j + 1] = s[j] * b0 + c[j] * b1;
    }
  }
  REAL sum = 0;
  EACH(i, D) EACH(j, i + 1) {
    REAL z = SUBTRACTED((to[i * D + j] + to[j * D + i]) / 2, b, u[i] * u[j]);
    to[i * D + j] = to[j * D + i] = z;
    sum += z;
  }
  return sum;
}

/* Row i of a diagonal P after a write that leaves less than RESOLVED of its variance z: `look` of diagonal.c, with pairs
 * of rows as neighbours. */
static REAL write_resolved(const REAL *P, const REAL *c, const REAL *s, const REAL *k, const REAL *u, const REAL *l2,
                           REAL r2, REAL z, int64_t i, int64_t D) {
  if (!s) {
    REAL d = r2;
    EACH(n, D) d += n == i ? 0 : k[n] * u[n];
    return resolved(z, k[i], d);
  }
  int64_t j = i ^ 1, pair = i / 2;
  REAL d = r2, c2 = c[pair] * c[pair], s2 = s[pair] * s[pair], w = c[pair] * s[pair] * (P[2 * pair] - P[2 * pair + 1]);
  EACH(n, D / 2) {
    REAL both = k[2 * n] * u[2 * n] + k[2 * n + 1] * u[2 * n + 1];
    d += n == pair || both < 0 ? 0 : both;
  }
  REAL turned_i = c2 * P[i] + s2 * P[j], turned_j = s2 * P[i] + c2 * P[j];
  REAL noise_i = l2[i], noise_j = l2[j];
  REAL determinant = (c2 + s2) * (c2 + s2) * P[i] * P[j] + noise_i * turned_j + noise_j * turned_i + noise_i * noise_j;
  return resolved(z, k[i] + w * k[j] / z, d + k[j] * k[j] * (determinant / z));
}

/* The diagonal of A P A' + l2 N - b u u' for a diagonal P. Returns its sum; NaN if a variance of P is negative. */
INLINE REAL write_diagonal(REAL *restrict to, const REAL *restrict P, const REAL *restrict c, const REAL *restrict s,
                           const REAL *restrict k, const REAL *restrict u, REAL b, const REAL *restrict l2,
                           int64_t every, REAL r2, int64_t D) {
  REAL sum = 0;
  EACH(i, D) {
    REAL z = s ? c[i / 2] * c[i / 2] * P[i] + s[i / 2] * s[i / 2] * P[i ^ 1] : c[i] * c[i] * P[i];
    if (i % every == 0) z += l2[i];
    to[i] = z - b * u[i] * u[i];
    if (to[i] < RESOLVED * z) to[i] = write_resolved(P, c, s, k, u, l2, r2, z, i, D);
    sum += P[i] < 0 ? (REAL)NAN : to[i];
  }
  return sum;
}

/* Whether a write took more than half of the largest variance that P had before it, which is P + b u u': only then can
 * rounding errors that were small compared with it become large. */
INLINE int shrinks(const REAL *P, const REAL *u, REAL b, int64_t D) {
  REAL largest = 0, before = 0, after = 0;
  _Pragma("omp simd reduction(max : largest)") EACH(i, D) largest = u[i] * u[i] > largest ? u[i] * u[i] : largest;
  if (b * largest <= P[0]) return 0; /* no variance lost more than one that is left, without a walk of the diagonal */
  EACH(i, D) {
    REAL left = P[i * D + i], predicted = left + b * u[i] * u[i];
    before = predicted > before ? predicted : before;
    after = left > after ? left : after;
  }
  return after < before / 2;
}

/* Whether P is no longer positive semi-definite, or there is no memory to see it: then the slow path looks. */
static int lost(const REAL *P, int64_t D) {
  int64_t missing = 0;
  REAL *work = room(D * (D + TILE_COLUMNS), &missing);
  int flawed = !work || indefinite(P, D, work);
  free(work);
  return flawed;
}
