/* Each open gets the lowest free number, which a thread closes and opens again and again. Ends on SIGTERM and prints OK and how often, or the
 * first harm. */
#include "hooked.h"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

static volatile sig_atomic_t stop;

static void on_term(int signal) { (void)signal, stop = 1; }

static void *call(void *unused) {
  for (long n = 0; !stop; n++) {
    if (hooked(n) != 3 * n + 7) _exit(3);
    if (n % 64 == 0) usleep(200);
  }
  return unused;
}

int main(void) {
  signal(SIGTERM, on_term);
  int lowest = open("/dev/null", O_RDONLY);
  pthread_t caller;
  pthread_create(&caller, 0, call, 0);
  printf("READY %lx\n", (unsigned long)hooked), fflush(stdout);
  unsigned long times = 0;
  for (; !stop; times++) {
    close(lowest);
    if (times % 256 == 0) usleep(50);
    int got = open("/dev/null", O_RDONLY);
    if (got != lowest) {
      printf("HARM %d in place of %d\n", got, lowest), fflush(stdout);
      _exit(3);
    }
  }
  pthread_join(caller, 0);
  printf("OK %lu\n", times), fflush(stdout);
  return 0;
}
