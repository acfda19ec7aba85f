/* ROUNDS: pairs of an allocator that takes a format and numbers. In a call of a variadic function, al says how many
 * vector registers have arguments (System V ABI 3.2.3). Ends with 99 if a number arrives as another one. */
#include <stdarg.h>
#include <string.h>
#include "truth.h"
enum { POOL = 1 << 20, MOST = 4096 };
static char pool[POOL] __attribute__((aligned(16)));
static size_t used;
/* Both call another file, because functions that do not are probed anyway. */
NOINLINE void *make(size_t n, const char *format, ...) {
  va_list numbers;
  va_start(numbers, format);
  double *p = (double *)(pool + used);
  memset(p, 1, n);
  p[0] = va_arg(numbers, double);
  p[1] = va_arg(numbers, double);
  va_end(numbers);
  used = (used + n + 15) & ~(size_t)15;
  if (used > POOL - MOST) used = 0;
  return p;
}
NOINLINE void unmake(void *p) {
  memset(p, 2, 1 + used % 16);
  KEEP(p);
}
static void *made(size_t n) {
  static uint64_t count;
  double first = (double)++count, second = 1.5 * (double)count;
  double *p = make(n, "%f %f", first, second);
  if (p[0] != first || p[1] != second) die("a number arrived as another one");
  return p;
}
SITE(00, made(n))
int main(int argc, char **argv) {
  uint64_t rounds = argument(argc, argv, 1, 2000);
  ready();
  for (uint64_t r = 0; r < rounds; r++) {
    size_t n = 16 + r % 1000;
    void *p = site_00(n);
    took(0, n);
    unmake(p);
    gave(0, n);
  }
  report();
  return 0;
}
