// 16-bit floating point, bit by bit: the same on every machine.
#pragma once
#include <stdint.h>
#include <string.h>

namespace device {

template <class To, class From>
inline To bits_as(From from) {
  To to{};
  static_assert(sizeof from <= sizeof to);
  memcpy(&to, &from, sizeof from);
  return to;
}
template <class To>
inline To low_bits_as(uint64_t from) {  // the lowest byte is first on x86-64 and aarch64
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

inline float from_bf16(uint16_t x) { return bits_as<float>((uint32_t)x << 16); }
inline uint16_t to_bf16(float x) {  // to nearest, ties to even
  const uint32_t bits = bits_as<uint32_t>(x);
  return x != x ? 0x7fff : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_fp16(uint16_t x) {
  const uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = (uint32_t)(x & 0x7fff) << 13;
  if (rest >= 0x7c00 << 13) return bits_as<float>(sign | 0x7f800000 | rest);  // infinity or NaN
  return bits_as<float>(sign | bits_as<uint32_t>(bits_as<float>(rest) * 0x1p112f));
}
inline uint16_t to_fp16(float x) {  // to nearest, ties to even
  if (x != x) return 0x7fff;
  const uint32_t bits = bits_as<uint32_t>(x), rest = bits & 0x7fffffff;
  const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  if (rest >= 0x477ff000) return sign | 0x7c00;  // 65520 and more
  if (rest < 0x38800000)  // subnormal: a multiple of 2^-24, which is the spacing of numbers from 0.5 on
    return sign | (uint16_t)(bits_as<uint32_t>(bits_as<float>(rest) + 0.5f) - 0x3f000000);
  return sign | (uint16_t)((rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13);
}

}  // namespace device
