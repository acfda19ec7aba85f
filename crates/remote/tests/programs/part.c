/* KIND TENTHS: a thread makes calls that wait for others with a part done: it writes more than fits into a pipe ("write"), or receives with
 * MSG_WAITALL what comes in pieces ("recv"), that many tenths of the time. Ends on SIGTERM and prints OK, how many calls it made, and how
 * many of them came back with a part. */
#define _GNU_SOURCE
#include "hooked.h"
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PIECES = 20, PIECE = 8 << 10, PAUSE = 1000, ALL = PIECES * PIECE };
static volatile sig_atomic_t stop;
static int writes, fds[2];
static unsigned long calls, parts;

static void on_term(int signal) { (void)signal, stop = 1; }

/* The other side, a piece at a time. */
static void *other(void *unused) {
  static char bytes[PIECE];
  for (;;) {
    /* It does not wait in a call of the other kind itself. */
    ssize_t done = writes ? read(fds[0], bytes, PIECE) : send(fds[1], bytes, PIECE, MSG_DONTWAIT);
    if (!done) return unused;
    usleep(PAUSE);
  }
}

static void *waits(void *tenths) {
  static char bytes[ALL];
  for (long n = 0; !stop; n++) {
    long at = 0;
    while (at < ALL && !stop) {
      ssize_t done = writes ? write(fds[1], bytes + at, ALL - at) : recv(fds[0], bytes + at, ALL - at, MSG_WAITALL);
      if (done <= 0) _exit(4);
      calls++, parts += done < ALL - at, at += done;
    }
    if (hooked(n) != 3 * n + 7) _exit(3);
    usleep((10 - (long)tenths) * PIECES * PAUSE / (long)tenths);
  }
  return 0;
}

int main(int argc, char **argv) {
  signal(SIGTERM, on_term);
  writes = !strcmp(argv[1], "write");
  if (writes ? pipe(fds) : socketpair(AF_UNIX, SOCK_STREAM, 0, fds)) return 2;
  if (writes) fcntl(fds[1], 1031 /* F_SETPIPE_SZ */, 4096);
  int least = 4096;
  setsockopt(fds[1], SOL_SOCKET, SO_SNDBUF, &least, sizeof least);
  pthread_t threads[2];
  pthread_create(&threads[0], 0, waits, (void *)atol(argv[2])), pthread_create(&threads[1], 0, other, 0);
  printf("READY %lx\n", (unsigned long)hooked), fflush(stdout);
  pthread_join(threads[0], 0);
  printf("OK calls %lu parts %lu\n", calls, parts), fflush(stdout);
  _exit(0);
}
