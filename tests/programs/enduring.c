/* MODE N: a program that checks what its allocator gives it, in a state that is hard on a profiler. Prints READY and its pid, works
 * until a line on its input, and prints OK and what it did; ends at the next line.
 *   threads N   N threads, each of which checks its own blocks now and then
 *   exec        starts itself again and again, in the same process, PAUSE_US microseconds apart
 *   strict      under seccomp's strict mode: read, write and exit only; N rounds after the line
 *   kill, trap, errno
 *               under a filter with the few calls that it makes itself; anything else ends it, raises SIGSYS, or fails; N rounds
 *               after the line */
#include <fcntl.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static volatile int over;

/* Ends this process, also where only `exit` is allowed. */
static void leave(int status) {
  syscall(SYS_exit, status);
}
static void say(const char *text) {
  if (write(1, text, strlen(text)) < 0) leave(98);
}
static void fail(const char *what) {
  if (write(2, what, strlen(what)) < 0) leave(98);
  leave(99);
}
static void wait_line(void) {
  char c = 0;
  while (c != '\n' && read(0, &c, 1) > 0) {}
}
static uint64_t next_random(uint64_t *state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
/* Takes, fills, grows, checks and frees blocks. Returns a sum of what was in them, which depends on the seed alone. */
static uint64_t work(uint64_t seed, int rounds) {
  enum { KEPT = 8 };
  unsigned char *blocks[KEPT] = {0};
  size_t sizes[KEPT] = {0};
  uint64_t sum = seed;
  for (int round = 0; round < rounds + KEPT; round++) {
    int i = round % KEPT;
    if (blocks[i]) {
      for (size_t k = 0; k < sizes[i]; k++) sum = sum * 31 + blocks[i][k];
      free(blocks[i]);
      blocks[i] = 0;
    }
    if (round >= rounds) continue;
    uint64_t r = next_random(&seed);
    size_t first = 1 + r % 300;
    sizes[i] = first + (r >> 16) % 300;
    unsigned char *block = r >> 32 & 1 ? malloc(first) : calloc(1, first);
    if (!block) fail("no block\n");
    memset(block, (int)(r >> 40), first);
    block = realloc(block, sizes[i]);
    if (!block) fail("no larger block\n");
    for (size_t k = 0; k < first; k++) if (block[k] != (unsigned char)(r >> 40)) fail("realloc changed a block\n");
    memset(block + first, (int)(r >> 48), sizes[i] - first);
    blocks[i] = block;
  }
  return sum;
}

static uint64_t expected;
static _Atomic uint64_t checks_made;
static void *check_on(void *number) {
  uint64_t state = (uint64_t)(uintptr_t)number;
  while (!over) {
    if (work(1, 40) != expected) fail("a sum is wrong\n");
    checks_made++;
    usleep(200000 + next_random(&state) % 800000);
  }
  return 0;
}
static void with_threads(int count) {
  expected = work(1, 40);
  pthread_t *threads = malloc((size_t)count * sizeof *threads);
  pthread_attr_t small;
  pthread_attr_init(&small);
  pthread_attr_setstacksize(&small, 65536);
  for (int i = 0; i < count; i++)
    if (pthread_create(&threads[i], &small, check_on, (void *)(uintptr_t)(i + 1))) fail("no thread\n");
  printf("READY %d\n", getpid());
  fflush(stdout);
  wait_line();
  over = 1;
  for (int i = 0; i < count; i++) pthread_join(threads[i], 0);
  printf("OK %lu checks\n", (unsigned long)checks_made);
  fflush(stdout);
  wait_line();
}

/* The number and the sum so far go from one program to the next by their arguments. */
static void again(char **arguments, int count) {
  uint64_t number = count > 3 ? strtoull(arguments[2], 0, 10) : 0, sum = count > 3 ? strtoull(arguments[3], 0, 10) : 1;
  if (!number) {
    printf("READY %d\n", getpid());
    fflush(stdout);
  }
  /* What a program computes, the next one computes too. */
  uint64_t now = work(1, 200);
  if (number && now != sum) fail("a sum is wrong\n");
  const char *pause = getenv("PAUSE_US");
  if (pause) usleep((useconds_t)atoi(pause));
  struct pollfd input = {0, POLLIN, 0};
  if (poll(&input, 1, 0) > 0) {
    wait_line();
    printf("OK %lu programs\n", (unsigned long)(number + 1));
    fflush(stdout);
    wait_line();
    return;
  }
  char number_text[24], sum_text[24];
  snprintf(number_text, sizeof number_text, "%lu", (unsigned long)(number + 1));
  snprintf(sum_text, sizeof sum_text, "%lu", (unsigned long)now);
  execl(arguments[0], arguments[0], "exec", number_text, sum_text, (char *)0);
  fail("no exec\n");
}

static void confine(unsigned answer) {
  /* Without brk, mmap and munmap: the memory is there already. */
  struct sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_read, 4, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_write, 3, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit, 2, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_rt_sigreturn, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, answer),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
    fail("cannot install the filter\n");
}
static void confined(const char *mode, int rounds) {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
  free(malloc(1 << 20));
  expected = work(1, 200);
  char ready[32];
  snprintf(ready, sizeof ready, "READY %d\n", getpid());
  if (!strcmp(mode, "strict") && prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT)) fail("no strict mode\n");
  if (!strcmp(mode, "kill")) confine(SECCOMP_RET_KILL_PROCESS);
  if (!strcmp(mode, "trap")) confine(SECCOMP_RET_TRAP);
  if (!strcmp(mode, "errno")) confine(SECCOMP_RET_ERRNO | 38);
  say(ready);
  wait_line();
  for (int i = 0; i < rounds; i++) if (work(1, 200) != expected) fail("a sum is wrong\n");
  say("OK\n");
  wait_line();
  leave(0);
}

int main(int count, char **arguments) {
  const char *mode = count > 1 ? arguments[1] : "threads";
  int number = count > 2 ? atoi(arguments[2]) : 100;
  if (!strcmp(mode, "threads")) with_threads(number);
  else if (!strcmp(mode, "exec")) again(arguments, count);
  else confined(mode, number);
  return 0;
}
