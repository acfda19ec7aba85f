/* The program that the benchmark of many processes runs: it allocates for a millisecond ten times a second, until its
 * standard input ends. */
#include <poll.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
static volatile void *kept;
int main(void) {
  struct pollfd input = {0, POLLIN, 0};
  if (write(1, "READY\n", 6) < 0) return 1;
  while (poll(&input, 1, 100) == 0) {
    clock_t end = clock() + CLOCKS_PER_SEC / 1000;
    while (clock() < end) { kept = malloc(1000); free((void *)kept); }
  }
  return 0;
}
