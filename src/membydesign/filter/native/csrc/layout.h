/* Structs and functions that Python uses, each stated once.
 *
 * A struct is a list of fields: a macro that applies X(kind, name) to each of them. STRUCT makes from it the type and a
 * string that says the same, which Python (../structs.py) reads from the compiled library and fills the struct by. So
 * fields may be added, removed and reordered here; what Python then leaves out or does not know is refused by name.
 */
#ifndef LAYOUT_H
#define LAYOUT_H
#include "target.h"
#include <stdint.h>

#define FIELD_INT(name) int64_t name;
#define FIELD_DOUBLE(name) double name;
#define FIELD_READ(name) const REAL *name;          /* a tensor to read */
#define FIELD_READ_OR_NULL(name) const REAL *name;  /* the same where it may be absent */
#define FIELD_WRITE(name) REAL *name;               /* a tensor to write, or to update in place */
#define FIELD_WRITE_OR_NULL(name) REAL *name;

#define FIELD(kind, name) FIELD_##kind(name)
#define FIELD_LAYOUT(kind, name) #kind " " #name "\n"
#define STRUCT(Name, FIELDS)                \
  typedef struct { FIELDS(FIELD) } Name;    \
  const char *const Name##_layout = FIELDS(FIELD_LAYOUT);

/* A function of two structs that works on all heads; its body follows. It returns 0 if all went well, and otherwise
 * what its source says. Python learns which structs it takes. */
#define ENTRY(function, First, first, Second, second)            \
  const char *const function##_structs = #First " " #Second;     \
  int64_t function(const First *first, const Second *second, int64_t heads, int64_t threads)

/* Named cases: an enum, and the string of its names in order. */
#define CASE(name) name,
#define CASE_NAME(name) #name " "
#define CASES(Name, LIST)        \
  enum Name { LIST(CASE) };      \
  const char *const Name##_cases = LIST(CASE_NAME);
#endif
