#include "harness.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <thread>
#include <utility>

namespace fastattn::testing {
namespace {

char current[512] = "(no case)";
int failed = 0;

// A format: its mantissa bits after the leading one, and the exponents of its smallest and largest normal numbers.
struct Format {
  int bits, minimum, maximum;
};

Format format_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::bfloat16: return {7, -126, 127};
    case Dtype::float16: return {10, -14, 15};
    default: return {23, -126, 127};
  }
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

const char* name_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::float32: return "float32";
    case Dtype::bfloat16: return "bfloat16";
    case Dtype::float16: return "float16";
    default: return "bool";
  }
}

double round_to(Dtype dtype, double value) {
  if (value == 0 || !isfinite(value)) return value;
  const Format format = format_of(dtype);
  const int exponent = ilogb(value) > format.minimum ? ilogb(value) : format.minimum;
  const double step = ldexp(1, exponent - format.bits), rounded = nearbyint(value / step) * step;
  return ilogb(rounded) > format.maximum ? copysign(INFINITY, rounded) : rounded;
}

double unit_roundoff(Dtype dtype) { return ldexp(1, -format_of(dtype).bits - 1); }

Dtype any_float(Random& random) { return random.pick({Dtype::float32, Dtype::bfloat16, Dtype::float16}); }

int64_t any_window(Random& random, int64_t reach) {
  return random.chance(40) ? reach : min(random.pick<int64_t>({0, 3, 20, 40}), reach);
}

Buffer::Buffer(Dtype type, int64_t elements, bool at_end) : dtype(type), count(elements) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), size = (size_t)count * (size_t)size_of(dtype);
  const size_t pages = (size + page - 1) / page * page;
  mapped_ = pages + 2 * page;
  mapping_ = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) abort();
  char* first = (char*)mapping_ + page;
  if (pages && mprotect(first, pages, PROT_READ | PROT_WRITE)) abort();
  data = at_end ? first + pages - size : first;
  fill_nan();
}

Buffer::Buffer(Buffer&& other) noexcept
    : dtype(other.dtype), count(other.count), data(other.data), mapping_(other.mapping_), mapped_(other.mapped_) {
  other.mapping_ = nullptr;
}

Buffer::~Buffer() {
  if (mapping_) munmap(mapping_, mapped_);
}

double Buffer::get(int64_t index) const {
  const char* at = (const char*)data + (size_t)index * (size_t)size_of(dtype);
  if (dtype == Dtype::boolean) return *(const uint8_t*)at;
  if (dtype == Dtype::float32) {
    float value;
    memcpy(&value, at, sizeof value);
    return value;
  }
  uint16_t bits;
  memcpy(&bits, at, sizeof bits);
  const Format format = format_of(dtype);
  const int exponent = (bits & 0x7fff) >> format.bits, mantissa = bits & ((1 << format.bits) - 1);
  double value = ldexp(exponent ? mantissa + (1 << format.bits) : mantissa,
                       (exponent ? exponent - 1 : 0) + format.minimum - format.bits);
  if (exponent == 2 * format.maximum + 1) value = mantissa ? NAN : INFINITY;
  return bits & 0x8000 ? -value : value;
}

void Buffer::set(int64_t index, double value) {
  char* at = (char*)data + (size_t)index * (size_t)size_of(dtype);
  const double rounded = round_to(dtype, value);
  if (dtype == Dtype::boolean) {
    *(uint8_t*)at = (uint8_t)value;
    return;
  }
  if (dtype == Dtype::float32) {
    const float narrow = (float)rounded;
    memcpy(at, &narrow, sizeof narrow);
    return;
  }
  const Format format = format_of(dtype);
  const double magnitude = fabs(rounded);
  uint16_t bits;
  if (isnan(rounded)) {
    bits = 0x7fff;
  } else if (isinf(rounded)) {
    bits = (uint16_t)((2 * format.maximum + 1) << format.bits);
  } else {  // The count of the format's steps is its bits: an overflow of the mantissa increments the exponent.
    const int exponent = magnitude == 0 || ilogb(magnitude) < format.minimum ? format.minimum : ilogb(magnitude);
    bits = (uint16_t)(((exponent - format.minimum) << format.bits) + (int)ldexp(magnitude, format.bits - exponent));
  }
  if (signbit(rounded)) bits |= 0x8000;
  memcpy(at, &bits, sizeof bits);
}

void Buffer::fill_nan() { memset(data, 0xff, (size_t)count * (size_t)size_of(dtype)); }

std::vector<char> Buffer::bytes() const {
  const char* first = (const char*)data;
  return std::vector<char>(first, first + (size_t)count * (size_t)size_of(dtype));
}

void begin_case(const std::string& name) {
  static const bool installed = [] {
    struct sigaction action = {};
    action.sa_handler = on_crash;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
    return true;
  }();
  (void)installed;
  snprintf(current, sizeof current, "%s", name.c_str());
}

void fail(const std::string& what) {
  fprintf(stderr, "FAILED (%s): %s\n", what.c_str(), current);
  ++failed;
}

int failures() { return failed; }

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

static void run_workers(int workers, void (*body)(void*, int), void* argument) {
  std::vector<std::thread> others;
  for (int worker = 1; worker < workers; ++worker) others.emplace_back(body, argument, worker);
  body(argument, 0);
  for (std::thread& other : others) other.join();
}

void run_on_threads(const std::vector<Buffer*>& outputs, const std::function<void(const Parallel&)>& kernel) {
  std::vector<std::vector<char>> first;
  for (const int threads : {1, 2, 5}) {
    for (Buffer* output : outputs) output->fill_nan();
    kernel(Parallel{threads, run_workers});
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (threads == 1)
        first.push_back(outputs[i]->bytes());
      else if (outputs[i]->bytes() != first[i])
        fail("output " + std::to_string(i) + " differs between 1 and " + std::to_string(threads) + " threads");
    }
  }
}

void expect_again(Buffer& out, const std::function<void(const Parallel&)>& kernel) {
  const std::vector<char> before = out.bytes();
  out.fill_nan();
  kernel(Parallel{2, run_workers});
  if (out.bytes() != before) fail("the output alone differs");
}

}  // namespace fastattn::testing
