#include "harness.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <thread>

namespace fastattn::testing {
namespace {

char current[512] = "(no case)";
int failed = 0;

// A format: its mantissa bits after the leading one, and the exponents of its smallest and largest normal numbers.
struct Format {
  int bits, minimum, maximum;
};

Format format_of(Dtype dtype) {
  return dtype == Dtype::bfloat16  ? Format{7, -126, 127}
         : dtype == Dtype::float16 ? Format{10, -14, 15}
                                   : Format{23, -126, 127};
}

void on_crash(int) {
  static const char message[] = "FAILED (memory access outside the operands): ";
  const auto ignored = write(2, message, sizeof message - 1) + write(2, current, strlen(current)) + write(2, "\n", 1);
  (void)ignored;
  _exit(1);
}

}  // namespace

uint64_t Random::next() {
  uint64_t z = state += 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

double Random::normal() {  // the sum of twelve uniform numbers has variance 1
  double sum = -6;
  for (int i = 0; i < 12; ++i) sum += (double)(next() >> 11) * 0x1p-53;
  return sum;
}

std::ostream& operator<<(std::ostream& out, Dtype dtype) {
  static const char* const names[] = {"float32", "bfloat16", "float16", "bool"};
  return out << names[(int)dtype];
}

double unit_roundoff(Dtype dtype) { return ldexp(1, -format_of(dtype).bits - 1); }

Dtype any_float(Random& random) { return random.pick({Dtype::float32, Dtype::bfloat16, Dtype::float16}); }

double kept_scale(int threshold) { return threshold < 65536 ? 65536.0 / (65536 - threshold) : 0; }

Buffer::Buffer(Dtype type, int64_t elements, bool at_end) : dtype(type), count(elements) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), size = (size_t)(count * size_of(dtype));
  const size_t pages = (size + page - 1) / page * page;
  mapped_ = pages + 2 * page;
  mapping_ = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  char* first = (char*)mapping_ + page;
  if (mapping_ == MAP_FAILED || (pages && mprotect(first, pages, PROT_READ | PROT_WRITE))) abort();
  data = at_end ? first + pages - size : first;
  fill_nan();
}

Buffer::~Buffer() { munmap(mapping_, mapped_); }

double Buffer::get(int64_t index) const {
  if (dtype == Dtype::boolean) return ((const uint8_t*)data)[index];
  if (dtype == Dtype::float32) return ((const float*)data)[index];
  const Format format = format_of(dtype);
  const int bits = ((const uint16_t*)data)[index], mantissa = bits & ((1 << format.bits) - 1);
  const int exponent = (bits & 0x7fff) >> format.bits, normal = exponent != 0;
  double value = ldexp(mantissa + (normal << format.bits), exponent - normal + format.minimum - format.bits);
  if (exponent == 2 * format.maximum + 1) value = mantissa ? NAN : INFINITY;
  return bits & 0x8000 ? -value : value;
}

void Buffer::set(int64_t index, double value) {
  if (dtype == Dtype::boolean) {
    ((uint8_t*)data)[index] = (uint8_t)value;
  } else if (dtype == Dtype::float32) {
    ((float*)data)[index] = (float)value;
  } else {  // The count of the format's steps is its bits: an overflow of the mantissa increments the exponent.
    const Format format = format_of(dtype);
    const double magnitude = fabs(value), infinity = (2 * format.maximum + 1) << format.bits;
    const bool normal = isfinite(magnitude) && magnitude >= ldexp(1, format.minimum);
    const int exponent = normal ? ilogb(magnitude) : format.minimum;
    const double steps = nearbyint(ldexp(magnitude, format.bits - exponent));
    const double bits = ((exponent - format.minimum) * ldexp(1, format.bits)) + steps;
    const int sign = signbit(value) ? 0x8000 : 0;
    ((uint16_t*)data)[index] = (uint16_t)(sign | (isnan(value) ? 0x7fff : (int)min(bits, infinity)));
  }
}

void Buffer::fill_nan() { memset(data, 0xff, (size_t)(count * size_of(dtype))); }

std::string Buffer::bytes() const { return std::string((const char*)data, (size_t)(count * size_of(dtype))); }

Operand::Operand(Random& random, Dtype dtype, int64_t batches, int64_t heads, int64_t rows, int64_t columns,
                 bool heads_inside, double scale, double mean) {
  const int64_t padding = random.between(0, 5), padded = columns + padding, count = batches * heads * rows * padded;
  row = heads_inside ? heads * padded : padded;
  head = heads_inside ? padded : rows * padded;
  batch = batches == 1 ? 0 : heads * rows * padded;
  buffer = std::make_unique<Buffer>(dtype, count ? count - padding : 0, random.chance(50));
  zeros.assign((size_t)buffer->count, NAN);
  for (int64_t i = 0; i < buffer->count; ++i) {
    if (i % padded >= columns) continue;
    buffer->set(i, random.normal() * scale + mean);
    zeros[(size_t)i] = 0;
  }
}

RandomMask::RandomMask(Random& random, int64_t batches, int64_t heads, int64_t rows, int64_t columns) {
  mask.dtype = random.chance(50) ? Dtype::boolean : any_float(random);
  int64_t* sizes[4] = {&mask.columns, &mask.rows, &mask.heads, &mask.batches};
  int64_t* strides[4] = {&mask.column, &mask.row, &mask.head, &mask.batch};
  const int64_t shape[4] = {columns, rows, heads, batches};
  int64_t count = 1;
  for (int d = 0; d < 4; ++d) {
    const bool full = random.chance(d == 0 ? 90 : 60) && shape[d] != 1;
    *sizes[d] = full ? shape[d] : 1;
    *strides[d] = full ? count : 0;
    count *= *sizes[d];
  }
  buffer = std::make_unique<Buffer>(mask.dtype, count, random.chance(50));
  mask.data = buffer->data;
  const int hidden = (int)random.pick({0, 10, 50, 95});
  const bool has_tails = mask.columns > 1 && random.chance(50);
  finite_extremes = random.chance(20) && is_float();
  int64_t shown = mask.columns;  // columns shown in some rows; later columns are hidden
  for (int64_t i = 0; i < count; ++i) {
    if (has_tails && i % (32 * mask.columns) == 0) shown = random.between(0, mask.columns);
    const bool hide = random.chance(hidden) || i % mask.columns >= shown ||
                      (hidden > 10 && mask.columns > 1 && i % mask.columns < mask.columns / 2);
    if (is_float())
      buffer->set(i, !hide ? random.normal() : finite_extremes ? -65504 : -INFINITY);
    else
      buffer->set(i, hide ? 0 : (double)random.between(1, 255));
  }
}

double RandomMask::operator()(int64_t b, int64_t h, int64_t i, int64_t j) const {
  const double value = buffer ? buffer->get(at(b, h, i, j)) : 1;
  return is_float() ? value : value != 0 ? 0 : -INFINITY;
}

void begin_named_case(const std::string& name) {
  signal(SIGSEGV, on_crash), signal(SIGBUS, on_crash);
  snprintf(current, sizeof current, "%s", name.c_str());
}

void fail(const std::string& what) {
  fprintf(stderr, "FAILED (%s): %s\n", what.c_str(), current);
  ++failed;
}

int failures() { return failed; }

void run_workers(int workers, void (*body)(void*, int), void* argument) {
  std::vector<std::thread> others;
  for (int worker = 1; worker < workers; ++worker) others.emplace_back(body, argument, worker);
  body(argument, 0);
  for (std::thread& other : others) other.join();
}

void expect_close(const char* what, const Buffer& got, const std::vector<double>& want, double slack) {
  if ((int64_t)want.size() != got.count) return fail(std::string(what) + " has the wrong size: an error of the test");
  const double smallest = ldexp(1, format_of(got.dtype).minimum - format_of(got.dtype).bits);
  for (int64_t i = 0; i < got.count; ++i) {
    const double value = got.get(i), wanted = want[(size_t)i];
    if (isnan(wanted) ? isnan(value) : value == wanted) continue;
    if (fabs(value - wanted) <= 1.01 * unit_roundoff(got.dtype) * fabs(wanted) + slack + smallest) continue;
    char message[160];
    snprintf(message, sizeof message, "%s[%lld] = %.9g, expected %.9g, slack %.2g", what, (long long)i, value, wanted,
             slack);
    return fail(message);
  }
}

}  // namespace fastattn::testing
