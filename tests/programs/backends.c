/* CHILDREN BLOCKS SIZE LIFE: a server that forks a process for each connection, as PostgreSQL does. CHILDREN children are
 * alive at a time. Each allocates BLOCKS blocks of SIZE bytes and frees every second one, half of them before and half of
 * them after a sleep of LIFE microseconds, and exits; then the next one is forked. A line on standard input stops the
 * forking. The report is printed when all children have exited, and covers all of them together under the parent's
 * process id. The parent itself allocates nothing. */
#include <poll.h>
#include "truth.h"
SITE(00, malloc(n)) /* freed */
SITE(01, malloc(n)) /* in use when the child exits */

static NOINLINE void serve(uint64_t many, size_t size, uint64_t life_us) {
  struct timespec life = {(time_t)(life_us / 1000000), (long)(life_us % 1000000) * 1000};
  for (uint64_t k = 0; k < many; k++) {
    if (k == many / 2 && life_us) nanosleep(&life, 0);
    int kept = k % 2;
    void *p = kept ? site_01(size) : site_00(size);
    took(kept, size);
    if (!kept) { free(p); gave(kept, size); }
  }
}
static int asked_to_stop(void) {
  if (getenv("FREE_RUNNING")) return 0;
  struct pollfd input = {0, POLLIN, 0};
  return poll(&input, 1, 0) > 0;
}
int main(int argc, char **argv) {
  uint64_t children = argument(argc, argv, 1, 4), many = argument(argc, argv, 2, 50);
  uint64_t size = argument(argc, argv, 3, 1000), life_us = argument(argc, argv, 4, 2000);
  ready();
  uint64_t alive = 0;
  while (!asked_to_stop()) {
    while (alive < children) {
      pid_t child = fork();
      if (child < 0) die("fork");
      if (!child) {
        serve(many, size, life_us);
        _exit(0);
      }
      alive++;
    }
    if (waitpid(-1, 0, 0) > 0) alive--;
  }
  while (wait(0) > 0) {}
  wait_line();
  report();
  return 0;
}
