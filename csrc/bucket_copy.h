// Casts of a row, as the CPU twins over slices make them (bucket_copy_cpu.cpp).
#pragma once
#include <cstdint>

namespace stppo {

void widen(const uint16_t *source, float *target, int64_t width);
void narrow(const float *source, uint16_t *target, int64_t width);

}  // namespace stppo
