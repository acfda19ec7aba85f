//! Reads glibc's arenas in the memory of a running process (`crates/glibc`), without stopping it.
//!
//! Only pages that the page map reports as present are read, so nothing is swapped in and no fault handler is asked for
//! a page. A page that disappears after that check can still block the reader. So a separate thread does the reading,
//! and is abandoned if it does not return.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use heapbpf_glibc::{Heap, Memory, Space};
use heapbpf_remote::{Mapping, Maps};

use super::clock::thread_cpu_time;
use super::pages::Pages;
use super::process::Stat;
use super::processes::starts_agree;
use super::reader_thread::{NoAnswer, ReaderThread};

/// Maximum number of bytes to read from a process's list of mappings.
pub(crate) const MOST_TEXT_BYTES: u64 = 64 << 20;
/// How long to wait for the answer beyond the time that reading may take.
pub(crate) const GRACE: Duration = Duration::from_secs(4);

/// A process whose arenas are to be read.
#[derive(Clone, Copy, Debug)]
pub struct ArenaRequest {
    /// The process.
    pub pid: u32,
    /// Its start time, CLOCK_BOOTTIME.
    pub start_ns: u64,
    /// Its glibc is 2.`version`.
    pub version: u32,
    /// How long reading may take. What has not been read by then is reported as such.
    pub longest: Duration,
    /// Whether to look for Python's arenas, if there is an interpreter.
    pub with_python: bool,
}

/// What was found, and the CPU time that reading took.
pub type Answer = (Option<Heap>, Duration);

/// The handle to the thread that reads.
#[derive(Default)]
pub struct ArenaReader(ReaderThread);

impl ArenaReader {
    /// Reads the arenas of a process. `None` if the process has exited, if its memory may not be read, or if it has no
    /// arenas.
    ///
    /// # Errors
    /// [`NoAnswer`] if there is no answer in time: do not ask about this process again.
    pub fn read(&mut self, wanted: ArenaRequest) -> Result<Answer, NoAnswer> {
        self.0.ask("arenas", wanted.longest + GRACE, move || {
            let begun = thread_cpu_time();
            let heap = read(wanted);
            (heap, thread_cpu_time().saturating_sub(begun))
        })
    }
}

fn read(ArenaRequest { pid, start_ns, version, longest, with_python }: ArenaRequest) -> Option<Heap> {
    let deadline = Instant::now() + longest;
    let content = File::open(format!("/proc/{pid}/mem")).ok()?;
    let mut memory = Target { content, pages: Pages::of(pid)?, deadline };
    let mut text = Vec::new();
    File::open(format!("/proc/{pid}/maps")).ok()?.take(MOST_TEXT_BYTES).read_to_end(&mut text).ok()?;
    let stat = Stat::read(pid).ok().filter(|stat| starts_agree(stat.start_ns, start_ns))?;
    let space = space(&String::from_utf8_lossy(&text));
    let space = Space { threads: stat.threads.into(), has_python: space.has_python && with_python, ..space };
    let heap = heapbpf_glibc::read(&mut memory, &space, version);
    let mut heap = heap.inspect_err(|why| log::debug!("the arenas of {pid} are not read: {why:?}")).ok()?;
    // Once time is up, arenas look as if they were not there.
    if Instant::now() >= deadline {
        heap.python = None;
    }
    Some(heap)
}

/// The memory of a process. Reads fail after the deadline.
pub(crate) struct Target {
    pub(crate) content: File,
    pub(crate) pages: Pages,
    pub(crate) deadline: Instant,
}

impl Memory for Target {
    fn page_bytes(&self) -> u64 {
        self.pages.page_bytes
    }

    fn present(&mut self, first: u64, pages: &mut [bool]) {
        let is_read = Instant::now() < self.deadline && self.pages.present(first, pages);
        if !is_read {
            pages.fill(false);
        }
    }

    fn read(&mut self, address: u64, buffer: &mut [u8]) -> bool {
        Instant::now() < self.deadline && self.content.read_exact_at(buffer, address).is_ok()
    }
}

/// Whether a mapping holds private data that can be changed.
fn is_data(mapping: &Mapping) -> bool {
    mapping.is_readable && mapping.is_writable && !mapping.is_executable && !mapping.is_shared
}

/// Whether a path is that of glibc's library.
pub(crate) fn is_libc(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    name.starts_with("libc.so.6") || name.starts_with("libc-2.")
}

/// Whether a path is that of a Python interpreter.
pub(crate) fn is_python(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    name.starts_with("python") || name.starts_with("libpython")
}

/// Where a process has its heap, variables and anonymous memory. The variables are those of glibc's library, or those
/// of the program if no such library is mapped.
pub(crate) fn space(text: &str) -> Space {
    let maps = Maps::parse(text, 0);
    let mappings = maps.as_slice();
    let program = mappings.iter().map(|it| &*it.name).find(|name| name.starts_with('/'));
    let has_libc = mappings.iter().any(|it| is_libc(&it.name));
    let is_wanted = |name: &str| if has_libc { is_libc(name) } else { Some(name) == program };
    let mut space = Space { has_python: mappings.iter().any(|it| is_python(&it.name)), ..Space::default() };
    for (k, it) in mappings.iter().enumerate().filter(|(_, it)| is_data(it)) {
        let range = it.range.clone();
        match &*it.name {
            "[heap]" => match &mut space.heap {
                Some(heap) => heap.end = range.end,
                heap => *heap = Some(range),
            },
            name if is_wanted(name) => {
                // Zero-initialised variables (.bss) follow it.
                let next = mappings.get(k + 1).filter(|next| is_data(next) && next.name.is_empty());
                let next = next.filter(|next| next.range.start == range.end);
                space.data.push(range.start..next.map_or(range.end, |next| next.range.end));
            }
            name if name.is_empty() || name.starts_with("[anon:") => space.anonymous.push(range),
            _ => {}
        }
    }
    space
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::process::{Child, Command, Stdio};

    use super::*;

    const VARIABLE: &str = "HEAPBPF_ARENAS_CHILD";
    const LONGEST: Duration = Duration::from_secs(60);

    #[test]
    fn mappings_are_told_apart() {
        let text = "\
400000-401000 rw-p 00000000 fe:00 9    /usr/bin/x
401000-402000 rw-p 00000000 00:00 0 
500000-600000 rw-p 00000000 00:00 0                                      [heap]
7f0000000000-7f0000005000 rw-p 00001000 fe:00 99                         /usr/lib/libc.so.6 (deleted)
7f0000005000-7f0000012000 rw-p 00000000 00:00 0 
7f0000020000-7f0000021000 rw-s 00000000 00:01 7                          /dev/zero (deleted)
7f0000030000-7f0000031000 ---p 00000000 00:00 0 
x-7f0000031000 rw-p 00000000 00:00 0 
2-1 rw-p 0 0 0
";
        let found = space(text);
        assert_eq!(found.data.first(), Some(&(0x7f00_0000_0000..0x7f00_0001_2000)));
        assert_eq!((found.heap, found.anonymous.len()), (Some(0x50_0000..0x60_0000), 2));
        let lines: Vec<&str> = text.lines().filter(|line| !line.contains("libc")).collect();
        assert_eq!(space(&lines.join("\n")).data.first(), Some(&(0x40_0000..0x40_2000)), "a static program");
        assert_eq!(space("\n \n-\n0-1").data, []);
        let interpreter = text.replace("/usr/bin/x", "/usr/bin/python3.11");
        let module = text.replace("/usr/bin/x", "/usr/lib/python3/x.so");
        assert_eq!([text, &*interpreter, &*module].map(|text| space(text).has_python), [false, true, false]);
    }

    /// What the child process runs. It prints glibc's own figures for its heap: bytes in use, free, in large blocks and
    /// in fast bins.
    #[test]
    fn as_the_child() {
        let Ok(kind) = std::env::var(VARIABLE) else { return };
        let (mut small, mut large): (Vec<Vec<u8>>, Vec<Vec<u8>>) = Default::default();
        for k in 0..20_000 {
            small.push(vec![1; 1 + k * 37 % 3000]);
        }
        (0..5).for_each(|k| large.push(vec![1; (1 + k) << 20]));
        (0..20_000).step_by(3).for_each(|k| small[k] = Vec::new());
        large[2] = Vec::new();
        small.extend((0..if kind == "fast" { 100 } else { 0 }).map(|_| vec![1; 40]));
        (0..100).for_each(|_| drop(small.pop()));
        // SAFETY: the call has no preconditions.
        let info = unsafe { libc::mallinfo2() };
        let stdout = std::io::stdout();
        writeln!(&stdout, "!{} {} {} {} {}", info.uordblks, info.fordblks, info.hblkhd, info.fsmblks, info.hblks)
            .expect("somebody reads");
        let mut byte = 0_u8;
        // SAFETY: reads into one byte of our own. The standard library's input would allocate.
        unsafe { libc::read(0, (&raw mut byte).cast(), 1) };
        drop((small, large));
    }

    fn child(kind: &str, tunables: &str) -> (Child, [u64; 5], impl Sized) {
        let mut command = Command::new(std::env::current_exe().expect("it runs"));
        command.args(["--exact", "arenas::tests::as_the_child", "--nocapture", "--test-threads=1"]);
        command.env(VARIABLE, kind).env("GLIBC_TUNABLES", tunables).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let mut lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        let printed = lines.by_ref().map_while(Result::ok).find_map(|line| Some(line.split_once('!')?.1.to_owned()));
        let printed: Vec<u64> =
            printed.expect("figures").split(' ').map(|word| word.parse().expect("a number")).collect();
        (child, printed.try_into().expect("five figures"), lines)
    }

    fn of(child: &Child) -> Heap {
        let pid = child.id();
        let start_ns = Stat::read(pid).expect("it runs").start_ns;
        let wanted = ArenaRequest { pid, start_ns, version: 36, longest: LONGEST, with_python: true };
        ArenaReader::default().read(wanted).expect("it answers").0.expect("glibc's heap")
    }

    #[test]
    fn what_glibc_says_of_itself_is_found_from_outside() {
        for (kind, tunables) in [("", "glibc.malloc.tcache_count=0"), ("fast", "glibc.malloc.tcache_count=0"), ("", "")]
        {
            let (mut child, [used, free, large, fast, larges], _output) = child(kind, tunables);
            let heap = of(&child);
            println!("{kind} {tunables}: {used} {free} {large} {fast}: {heap:?}");
            child.stdin.take().expect("it is piped").write_all(b"\n").expect("it reads");
            assert!(child.wait().expect("our own child").success());
            assert!(heap.is_exact(), "{heap:?}");
            assert_eq!(heap.mapped.len() as u64, larges);
            // glibc counts the headers of the other arenas as used, and also what the threads' caches hold.
            let cached = heap.cached_bytes - fast;
            assert_eq!((cached == 0, kind == "fast"), (!tunables.is_empty(), fast > 5_000));
            assert_eq!(heap.inuse_bytes + cached + (heap.arenas - 1) * 0x8d0, used + large);
            assert_eq!(heap.free_bytes - cached, free);
        }
    }
}
