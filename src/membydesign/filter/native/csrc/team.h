/* Threads that share one head, where there are fewer heads than threads. Include it after blocks.h.
 *
 * All threads of a team run the same functions on the same memory, each its own part of the work, and `meet` where one
 * needs what another wrote. What a thread computes does not depend on how many there are: entries of products and solves
 * are never split, so results are the same to the last bit for any number of threads.
 */
#include <sched.h>
#ifdef _OPENMP
int omp_get_thread_num(void); /* declared here, since a compiler may have OpenMP without its header on the path */
int omp_get_num_threads(void);
#else
INLINE int omp_get_thread_num(void) { return 0; }
INLINE int omp_get_num_threads(void) { return 1; }
#endif

#define TEAM_MOST 16     /* threads in a team, at most */
#define TEAMS_MOST 64    /* heads, at most, for which there are teams */
#define WORTH_A_TEAM (1 << 21) /* numbers of memory that a head passes over, from which on waking threads pays */
#define SPINS 4096       /* looks at whether the others have arrived before the processor is left to other threads */

/* Where a team meets, and where its members leave what the others need. */
typedef struct {
  int64_t arrived, round, failed;
  void *rooms[TEAM_MOST];
} Place;

typedef struct {
  int64_t rank, size;
  Place *place;
} Team;

/* Wait for all threads of the team; what they wrote before is then seen by all. */
static void meet(const Team *team) {
  if (!team->place) return;
  Place *place = team->place;
  const int64_t round = __atomic_load_n(&place->round, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&place->arrived, 1, __ATOMIC_ACQ_REL) == team->size) {
    __atomic_store_n(&place->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&place->round, round + 1, __ATOMIC_RELEASE);
    return;
  }
  for (int64_t looks = 0; __atomic_load_n(&place->round, __ATOMIC_ACQUIRE) == round; looks++) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
    if (looks >= SPINS) sched_yield();
  }
}

/* All members' rooms, to each of them; of one thread, its own stays the only one. */
static void team_rooms(const Team *team, void *mine, void **rooms) {
  if (!team->place) return;
  team->place->rooms[team->rank] = mine;
  meet(team);
  memcpy(rooms, team->place->rooms, team->size * sizeof(void *));
}

typedef struct {
  int64_t start, end;
} Range;

/* The part of n things that falls to one of `size` threads, in multiples of `grain`. */
INLINE Range part_of(int64_t n, int64_t grain, int64_t rank, int64_t size) {
  const int64_t grains = (n + grain - 1) / grain;
  return (Range){least(n, grains * rank / size * grain), least(n, grains * (rank + 1) / size * grain)};
}

INLINE Range part(const Team *team, int64_t n, int64_t grain) { return part_of(n, grain, team->rank, team->size); }

/* How many threads a head may have: as many as there are parts, or one if it passes over few numbers of memory. */
INLINE int64_t worth(int64_t numbers, int64_t pieces) { return numbers < WORTH_A_TEAM ? 1 : pieces; }

/* OVER_HEADS, but where there are fewer heads than threads, at most `most` of them share the `pieces` of a head, which
 * know nothing of each other: each call has the pieces start … end-1. */
#define OVER_PARTS(elements, pieces, most, call)                                                         \
  int64_t missing = 0;                                                                                   \
  const int64_t parts = heads < threads ? least(most, (threads + heads - 1) / heads) : 1;                \
  threads = least(threads, heads * parts);                                                               \
  _Pragma("omp parallel num_threads(threads) reduction(max : missing)") {                                \
    REAL *work = room(elements, &missing);                                                               \
    _Pragma("omp for schedule(dynamic, 1)") EACH(part, heads * parts) if (work) {                        \
      const int64_t head = part / parts, start = part % parts * (pieces) / parts;                        \
      const int64_t end = (part % parts + 1) * (pieces) / parts;                                         \
      call;                                                                                              \
    }                                                                                                    \
    free(work);                                                                                          \
  }                                                                                                      \
  return missing;

/* The same for work whose parts need each other: teams of at most `most` threads share a head. The call has the argument
 * `team` besides `head` and `work`. */
#define OVER_TEAMS(elements, most, call)                                                                   \
  int64_t missing = 0;                                                                                     \
  const int64_t each = heads && heads <= TEAMS_MOST ? least(least(threads / heads, most), TEAM_MOST) : 1;  \
  const int64_t members = each > 1 ? each : 1;                                                             \
  int64_t taken = 0; /* heads that threads on their own have taken */                                      \
  Place places[TEAMS_MOST] = {{0}};                                                                        \
  _Pragma("omp parallel num_threads(least(threads, heads * members)) reduction(max : missing)") {          \
    REAL *work = room(elements, &missing);                                                                 \
    const int64_t present = omp_get_num_threads(), me = omp_get_thread_num();                              \
    const int shared = members > 1 && present >= heads * members; /* the runtime may give fewer than asked for */ \
    Team team_here = {0, 1, NULL}, *team = &team_here;                                                     \
    int64_t head = heads;                                                                                  \
    if (shared) {                                                                                          \
      team_here = (Team){me % members, members, places + me / members};                                    \
      if (!work) __atomic_store_n(&team->place->failed, 1, __ATOMIC_RELAXED);                              \
      meet(team);                                                                                          \
      if (!__atomic_load_n(&team->place->failed, __ATOMIC_RELAXED)) head = me / members;                   \
    } else if (work) {                                                                                     \
      head = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);                                              \
    }                                                                                                      \
    while (head < heads) {                                                                                 \
      call;                                                                                                \
      head = shared ? heads : __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);                             \
    }                                                                                                      \
    free(work);                                                                                            \
  }                                                                                                        \
  return missing;
