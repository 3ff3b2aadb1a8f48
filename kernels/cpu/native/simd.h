// Vectors of 64 bytes, of which 16 floats or 64 bytes are lanes, and the operations on them.
//
// With AVX-512 a vector is a register, and the compiler's vector types do most of the work. With
// AVX2 it is a pair of registers. What is written in terms of this file serves both.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

// Each function here is small and takes vectors: it must disappear into its caller.
#define INLINE inline __attribute__((always_inline))

constexpr int LANES = 16;

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAS_VNNI 1
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(64)));  // 16 rows of 4 columns
#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
template <class T>
struct Pair {
    typedef T Half __attribute__((vector_size(32)));
    Half low, high;

    INLINE T& operator[](int lane) { return ((T*)this)[lane]; }
    INLINE T operator[](int lane) const { return ((const T*)this)[lane]; }
    template <class U>
    INLINE explicit operator Pair<U>() const {
        typedef typename Pair<U>::Half Other;
        return {(Other)low, (Other)high};
    }
    INLINE Pair operator-() const { return {-low, -high}; }
};
#define PAIRWISE(op)                                                                              \
    template <class T>                                                                            \
    INLINE Pair<T> operator op(Pair<T> a, Pair<T> b) { return {a.low op b.low, a.high op b.high}; } \
    template <class T>                                                                            \
    INLINE Pair<T> operator op(Pair<T> a, T b) { return {a.low op b, a.high op b}; }              \
    template <class T>                                                                            \
    INLINE Pair<T> operator op(T a, Pair<T> b) { return {a op b.low, a op b.high}; }              \
    template <class T, class U>                                                                   \
    INLINE Pair<T>& operator op##=(Pair<T>& a, U b) { return a = a op b; }
PAIRWISE(+)
PAIRWISE(-)
PAIRWISE(*)
PAIRWISE(/)
PAIRWISE(&)
PAIRWISE(|)
#undef PAIRWISE
template <class T>
INLINE Pair<T> operator<<(Pair<T> a, int by) { return {a.low << by, a.high << by}; }
typedef Pair<float> Floats;
typedef Pair<int32_t> Ints;
typedef Pair<uint32_t> Words;
typedef Pair<uint8_t> Bytes;
// there are no shifts of bytes: those of 16 bits, without what comes over from the neighbour
INLINE Bytes operator>>(Bytes a, int by) {
    __m256i kept = _mm256_set1_epi8((char)(255 >> by)), low = (__m256i)a.low, high = (__m256i)a.high;
    return {(Bytes::Half)_mm256_and_si256(_mm256_srli_epi16(low, by), kept),
            (Bytes::Half)_mm256_and_si256(_mm256_srli_epi16(high, by), kept)};
}
#else
#error "these kernels need AVX2 with FMA and F16C, or AVX-512 with VNNI"
#endif
typedef int8_t SignedBytes16 __attribute__((vector_size(16)));

template <class V>
INLINE V load(const void* from) {
    V value;
    memcpy(&value, from, sizeof value);
    return value;
}

template <class V>
INLINE void store(void* to, V value) {
    memcpy(to, &value, sizeof value);
}

#if !defined(HAS_VNNI)
// A copy of 64 bytes would go through memory.
template <>
INLINE Floats load<Floats>(const void* from) {
    return {load<Floats::Half>(from), load<Floats::Half>((const char*)from + 32)};
}

template <>
INLINE Bytes load<Bytes>(const void* from) {
    return {load<Bytes::Half>(from), load<Bytes::Half>((const char*)from + 32)};
}

INLINE void store(void* to, Floats value) {
    store(to, value.low);
    store((char*)to + 32, value.high);
}
#endif

INLINE Floats splat(float value) { return Floats{} + value; }

INLINE Ints splat_int(int32_t value) { return Ints{} + value; }

INLINE Bytes low_bits(Bytes value, int bits) { return value & (uint8_t)((1 << bits) - 1); }

// Of bytes below 16; there are no shifts of bytes.
INLINE Bytes times_sixteen(Bytes value) { return (Bytes)((Words)value << 4); }

INLINE Floats to_floats(Ints value) {
#if defined(HAS_VNNI)
    return __builtin_convertvector(value, Floats);
#else
    return {(Floats::Half)_mm256_cvtepi32_ps((__m256i)value.low),
            (Floats::Half)_mm256_cvtepi32_ps((__m256i)value.high)};
#endif
}

INLINE Ints to_ints(Floats value) {  // whole numbers
#if defined(HAS_VNNI)
    return __builtin_convertvector(value, Ints);
#else
    return {(Ints::Half)_mm256_cvttps_epi32((__m256)value.low),
            (Ints::Half)_mm256_cvttps_epi32((__m256)value.high)};
#endif
}

INLINE Floats greater(Floats a, Floats b) {
#if defined(HAS_VNNI)
    return a > b ? a : b;
#else
    return {(Floats::Half)_mm256_max_ps((__m256)a.low, (__m256)b.low),
            (Floats::Half)_mm256_max_ps((__m256)a.high, (__m256)b.high)};
#endif
}

INLINE Floats smaller(Floats a, Floats b) { return -greater(-a, -b); }

#if !defined(HAS_VNNI)
// Two registers side by side.
template <class V, class Half>
INLINE V both(Half low, Half high) {
    return {(typename V::Half)low, (typename V::Half)high};
}
#endif

INLINE Floats from_halves(const uint16_t* from) {
#if defined(HAS_VNNI)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
    return both<Floats>(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)),
                        _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 8))));
#endif
}

INLINE Floats from_bfloats(const uint16_t* from) {
#if defined(HAS_VNNI)
    Words wide = (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#else
    Words wide = both<Words>(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)),
                              _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(from + 8))));
#endif
    return (Floats)(wide << 16);
}

INLINE Floats from_bytes(const uint8_t* from) {
#if defined(HAS_VNNI)
    return to_floats((Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
#else
    return to_floats(both<Ints>(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)),
                                _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8)))));
#endif
}

INLINE Floats from_signed_bytes(const int8_t* from) {
#if defined(HAS_VNNI)
    return to_floats((Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#else
    return to_floats(both<Ints>(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)),
                                _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8)))));
#endif
}

// Lane r: sum + the four products of row r's bytes of `weights`, unsigned and at most 63, and the
// signed bytes of `four`, none of them -128. Pairs of products fit 16 bits.
INLINE Ints dot(Ints sum, Bytes weights, int32_t four) {
#if defined(HAS_VNNI)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(four));
#else
    __m256i ones = _mm256_set1_epi16(1), factor = _mm256_set1_epi32(four);
    __m256i low = _mm256_maddubs_epi16((__m256i)weights.low, factor);
    __m256i high = _mm256_maddubs_epi16((__m256i)weights.high, factor);
    return sum + both<Ints>(_mm256_madd_epi16(low, ones), _mm256_madd_epi16(high, ones));
#endif
}

// As `dot`, for bytes that stand for `byte - 128`. With AVX-512, which takes them as they are, the
// caller takes 128 times the sum of the signed bytes off: see `starts_at`.
INLINE Ints dot_signed(Ints sum, Bytes weights, int32_t four) {
#if defined(HAS_VNNI)
    return dot(sum, weights, four);
#else
    __m256i ones = _mm256_set1_epi16(1), factor = _mm256_set1_epi32(four);
    __m256i zero = _mm256_set1_epi8((char)0x80);
    __m256i low = _mm256_xor_si256((__m256i)weights.low, zero);
    __m256i high = _mm256_xor_si256((__m256i)weights.high, zero);
    low = _mm256_maddubs_epi16(_mm256_abs_epi8(low), _mm256_sign_epi8(factor, low));
    high = _mm256_maddubs_epi16(_mm256_abs_epi8(high), _mm256_sign_epi8(factor, high));
    return sum + both<Ints>(_mm256_madd_epi16(low, ones), _mm256_madd_epi16(high, ones));
#endif
}

#if !defined(HAS_VNNI)
INLINE __m256i where_set(const uint8_t* bits, uint8_t value) {
    const __m256i which = _mm256_set1_epi64x((long long)0x8040201008040201);
    const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2,
                                            2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    int32_t own;
    memcpy(&own, bits, 4);
    __m256i mask = _mm256_shuffle_epi8(_mm256_set1_epi32(own), spread);
    mask = _mm256_cmpeq_epi8(_mm256_and_si256(mask, which), which);
    return _mm256_and_si256(mask, _mm256_set1_epi8((char)value));
}
#endif

// Add `value` to the bytes whose bits are set in the 64 bits at `bits`.
INLINE Bytes add_where(Bytes bytes, const uint8_t* bits, uint8_t value) {
#if defined(HAS_VNNI)
    __mmask64 mask;
    memcpy(&mask, bits, 8);
    __m512i added = _mm512_set1_epi8((char)value), old = (__m512i)bytes;
    return (Bytes)_mm512_mask_add_epi8(old, mask, old, added);
#else
    return bytes + both<Bytes>(where_set(bits, value), where_set(bits + 4, value));
#endif
}

INLINE float sum_of(Floats value) {
#if defined(HAS_VNNI)
    return _mm512_reduce_add_ps((__m512)value);
#else
    Floats::Half eight = value.low + value.high;
    float four[4] = {eight[0] + eight[4], eight[1] + eight[5], eight[2] + eight[6], eight[3] + eight[7]};
    return (four[0] + four[2]) + (four[1] + four[3]);
#endif
}

INLINE float largest_of(Floats value) {
#if defined(HAS_VNNI)
    return _mm512_reduce_max_ps((__m512)value);
#else
    float most = value[0];
    for (int i = 1; i < LANES; ++i) most = value[i] > most ? value[i] : most;
    return most;
#endif
}

// 16 whole numbers from -127 to 127 as bytes.
INLINE SignedBytes16 to_bytes(Ints value) {
#if defined(HAS_VNNI)
    return (SignedBytes16)_mm512_cvtepi32_epi8((__m512i)value);
#else
    SignedBytes16 out;
    for (int i = 0; i < LANES; ++i) out[i] = (int8_t)value[i];
    return out;
#endif
}

INLINE Floats absolute(Floats value) { return (Floats)((Words)value & 0x7fffffffu); }

// e^x to about one unit in the last place; x is clamped to what a float holds.
INLINE Floats exp_of(Floats x) {
    x = smaller(greater(x, splat(-87.0f)), splat(88.0f));
    const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    Floats n = (x * 1.44269504088896341f + magic) - magic;
    Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    Floats p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return p * (Floats)((to_ints(n) + 127) << 23);
}
