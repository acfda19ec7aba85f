/* The programs that the benchmark of many processes runs.
 *   storm RATE COUNT LONG_EVERY SHORT LONG  starts COUNT processes, RATE a second: each LONG_EVERY-th is LONG; prints how
 *                                           many seconds that took, and the process id of each LONG
 *   storm rest                              allocates, prints a line, waits for the end of its standard input
 *   storm active                            the same, but allocates for a millisecond ten times a second until then
 *   storm brief | long                      allocates and exits, at once | after 150 ms, with 16 MiB in use */
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
static volatile void *kept;
static void allocate(void) { for (int i = 0; i < 10; i++) kept = malloc(1000); }
int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "brief";
  if (argc < 6) {
    allocate();
    if (!strcmp(mode, "long")) {
      /* The first 100 ms are for the profiler to find the process; later allocations must be seen. */
      usleep(100000);
      for (int i = 0; i < 16; i++) kept = malloc(1 << 20);
      usleep(50000);
    }
    if (!strcmp(mode, "rest")) {
      char c;
      if (write(1, "READY\n", 6) < 0) return 1;
      while (read(0, &c, 1) > 0) {}
    }
    if (!strcmp(mode, "active")) {
      struct pollfd input = {0, POLLIN, 0};
      if (write(1, "READY\n", 6) < 0) return 1;
      while (poll(&input, 1, 100) == 0) {
        clock_t end = clock() + CLOCKS_PER_SEC / 1000;
        while (clock() < end) { kept = malloc(1000); free((void *)kept); }
      }
    }
    return 0;
  }
  uint64_t rate = strtoull(argv[1], 0, 10), count = strtoull(argv[2], 0, 10), every = strtoull(argv[3], 0, 10);
  uint64_t longs = 0;
  pid_t *pids = calloc(count + 1, sizeof *pids);
  if (!pids) return 1;
  struct timespec begun;
  clock_gettime(CLOCK_MONOTONIC, &begun);
  for (uint64_t i = 0; i < count; i++) {
    int is_long = every && i % every == every - 1;
    pid_t child = fork();
    if (!child) {
      const char *program = argv[is_long ? 5 : 4];
      execl(program, program, is_long ? "long" : "brief", (char *)0);
      _exit(127);
    }
    if (child < 0) { perror("fork"); return 1; }
    if (is_long) pids[longs++] = child;
    while (waitpid(-1, 0, WNOHANG) > 0) {}
    uint64_t due = (uint64_t)begun.tv_nsec + (i + 1) * 1000000000ull / rate;
    struct timespec at = {begun.tv_sec + (time_t)(due / 1000000000ull), (long)(due % 1000000000ull)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, 0);
  }
  while (wait(0) > 0) {}
  struct timespec end;
  clock_gettime(CLOCK_MONOTONIC, &end);
  printf("%.3f", (double)(end.tv_sec - begun.tv_sec) + (double)(end.tv_nsec - begun.tv_nsec) * 1e-9);
  for (uint64_t i = 0; i < longs; i++) printf(" %d", pids[i]);
  printf("\n");
  return 0;
}
