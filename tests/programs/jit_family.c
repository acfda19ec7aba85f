/* ROUNDS: two processes forked from one parent make different code at the same address, which calls the allocator with
 * the same stack in both, after a step. Each writes a perf map: `jit_first` in the first, `jit_second` in the second. */
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include "truth.h"
SITE(00, malloc(n))
enum { CODE = 4096 };
static uint64_t rounds;

static NOINLINE void *wanted(void) {
  void *p = site_00(100);
  KEEP(p);
  return p;
}

/* Calls its argument and returns its result; `which` of two versions. */
static void write_code(unsigned char *code, int which) {
#if defined(__x86_64__)
  /* push %rbp; mov %rsp, %rbp; call *%rdi; nop or clc; pop %rbp; ret */
  unsigned char bytes[] = {0x55, 0x48, 0x89, 0xe5, 0xff, 0xd7, which ? 0xf8 : 0x90, 0x5d, 0xc3};
#elif defined(__aarch64__)
  /* stp x29, x30, [sp, #-16]!; mov x29, sp; blr x0; nop or yield; ldp x29, x30, [sp], #16; ret */
  uint32_t bytes[] = {0xa9bf7bfd, 0x910003fd, 0xd63f0000, which ? 0xd503203f : 0xd503201f, 0xa8c17bfd, 0xd65f03c0};
#else
#error "no code for this machine"
#endif
  memcpy(code, bytes, sizeof bytes);
  if (mprotect(code, CODE, PROT_READ | PROT_EXEC)) die("cannot make code");
  __builtin___clear_cache((char *)code, (char *)code + sizeof bytes);
}

static void write_map(const unsigned char *code, int which) {
  char path[64], line[64];
  snprintf(path, sizeof path, "/tmp/perf-%d.map", getpid());
  int bytes = snprintf(line, sizeof line, "%lx %x %s\n", (unsigned long)code, CODE, which ? "jit_second" : "jit_first");
  int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (fd < 0 || write(fd, line, (size_t)bytes) != bytes) die("cannot write the perf map");
  close(fd);
}

static NOINLINE void child(unsigned char *code, int which, int turn, int done) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  write_code(code, which);
  write_map(code, which);
  char c;
  if (read(turn, &c, 1) != 1) _exit(1);
  truth_is(which + 1);
  void *(*run)(void *(*)(void)) = (void *(*)(void *(*)(void)))code;
  for (uint64_t k = 0; k < rounds; k++) {
    void *p = run(wanted);
    took(0, 100);
    free(p);
    gave(0, 100);
  }
  if (write(done, &c, 1) != 1) _exit(1);
  for (;;) pause();
}

int main(int argc, char **argv) {
  rounds = argument(argc, argv, 1, 100);
  unsigned char *code = mmap(0, CODE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  int turn[2], done[2];
  if (code == MAP_FAILED || pipe(turn) || pipe(done)) die("no space");
  ready();
  int children[2];
  for (int which = 0; which < 2; which++)
    if (!(children[which] = fork())) child(code, which, turn[0], done[1]);
  step();
  if (write(turn[1], "go", 2) != 2) die("cannot start");
  char c;
  for (int which = 0; which < 2; which++)
    if (read(done[0], &c, 1) != 1) die("a child has ended");
  report();
  for (int which = 0; which < 2; which++) kill(children[which], SIGKILL);
  return 0;
}
