/* The instruction sets that the compiler may have used, as Linux names them: Python compares them with the CPU's when it
 * loads the library (../build.py), because a missing one kills the process. Those that float code makes use of. */
const char *const target_features = ""
#ifdef __SSE4_2__
    "sse4_2 "
#endif
#ifdef __AVX__
    "avx "
#endif
#ifdef __F16C__
    "f16c "
#endif
#ifdef __FMA__
    "fma "
#endif
#ifdef __FMA4__
    "fma4 "
#endif
#ifdef __AVX2__
    "avx2 "
#endif
#ifdef __BMI2__
    "bmi2 "
#endif
#ifdef __AVX512F__
    "avx512f "
#endif
#ifdef __AVX512BW__
    "avx512bw "
#endif
#ifdef __AVX512DQ__
    "avx512dq "
#endif
#ifdef __AVX512VL__
    "avx512vl "
#endif
#ifdef __ARM_NEON
    "asimd "
#endif
#ifdef __ARM_FEATURE_ATOMICS
    "atomics "
#endif
#ifdef __ARM_FEATURE_SVE
    "sve "
#endif
#ifdef __ARM_FEATURE_SVE2
    "sve2 "
#endif
    ;
