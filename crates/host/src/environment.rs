//! Reads settings from the environment that a process was started with.

use std::fs::File;
use std::io::Read;

/// Maximum number of bytes to read of an environment. The kernel allows more.
const MOST_BYTES: u64 = 1 << 20;

/// Whether a process that runs PHP was told to call malloc instead of PHP's own allocator.
pub fn php_calls_malloc(pid: u32) -> bool {
    let mut environment = Vec::new();
    let file = File::open(format!("/proc/{pid}/environ"));
    file.is_ok_and(|file| file.take(MOST_BYTES).read_to_end(&mut environment).is_ok()) && disables_zend(&environment)
}

/// Whether `USE_ZEND_ALLOC` is set to something that PHP reads as 0: anything that does not begin with a non-zero
/// number.
fn disables_zend(environment: &[u8]) -> bool {
    let value = environment.split(|byte| *byte == 0).find_map(|entry| entry.strip_prefix(b"USE_ZEND_ALLOC="));
    let number = |value: &[u8]| {
        let value = value.trim_ascii_start();
        let value = value.strip_prefix(b"-").or_else(|| value.strip_prefix(b"+")).unwrap_or(value);
        value.iter().take_while(|byte| byte.is_ascii_digit()).any(|byte| *byte != b'0')
    };
    value.is_some_and(|value| !number(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_php_reads_as_zero_disables_its_allocator() {
        for (value, disables) in [("0", true), ("", true), ("no", true), ("1", false), (" -2x", false), ("007", false)]
        {
            assert_eq!(disables_zend(format!("A=1\0USE_ZEND_ALLOC={value}\0B=0").as_bytes()), disables, "{value:?}");
        }
        assert!(!disables_zend(b"") && !disables_zend(b"XUSE_ZEND_ALLOC=0\0"));
        let mut child =
            std::process::Command::new("sleep").arg("60").env("USE_ZEND_ALLOC", "0").spawn().expect("sleep");
        // Its environment can be read once its exec has finished.
        let is_seen = |_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            php_calls_malloc(child.id())
        };
        assert!((0..1000).any(is_seen) && !php_calls_malloc(u32::MAX));
        child.kill().expect("our own child");
        child.wait().expect("our own child");
    }
}
