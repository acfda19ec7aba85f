/* OPS: a thread writes more than fits into a pipe that nobody reads until the first line, and ends the program if the call comes back with a
 * part of it. Then OPS pairs in the first thread, half of which stay. */
#include "truth.h"
enum { PIECE = 4096, BYTES = 1 << 20 };
SITE(00, malloc(n))
static int fds[2];
static char bytes[BYTES];

static void *writes(void *unused) {
  if (write(fds[1], bytes, BYTES) != BYTES) die("a write came back early");
  return unused;
}
static void read_all(void) {
  static char piece[PIECE];
  for (ssize_t left = BYTES; left > 0; left -= read(fds[0], piece, PIECE)) {}
}
int main(int argc, char **argv) {
  uint64_t ops = argument(argc, argv, 1, 2000);
  pthread_t writer;
  if (pipe(fds)) die("no pipe");
  pthread_create(&writer, 0, writes, 0);
  ready();
  read_all();
  pthread_join(writer, 0);
  for (uint64_t k = 0; k < ops; k++) {
    size_t size = 32 + k % 64;
    void *p = site_00(size);
    took(0, size);
    if (k % 2) {
      free(p);
      gave(0, size);
    }
  }
  report();
  return 0;
}
