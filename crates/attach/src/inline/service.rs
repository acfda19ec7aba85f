//! Finds the HTTP service of another heapbpf that hooks a process inline. `heapbpf top` can show what it records.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;

use heapbpf_host::process::all_pids;
use heapbpf_remote::blob_range;

/// Process name of the daemon.
const NAME: &str = "heapbpf";
/// Maximum number of descriptors of a daemon, and of sockets of a network, to examine. Listening sockets come first.
const MOST: usize = 1 << 16;
/// State of a listening socket in `/proc/net/tcp`.
const LISTENS: &str = "0A";

/// Option on the command line of a service with TLS.
const TLS: &[u8] = b"--tls-cert";

/// The end of a message about a process that another heapbpf hooks inline: how to see what that one records. Empty if
/// it does not listen.
#[must_use]
pub fn pointer_to(pid: u32) -> String {
    of_hooks_in(pid).map(|url| format!("; it is already being recorded: heapbpf top {url}")).unwrap_or_default()
}

/// URL of the heapbpf that hooks a process inline, if it listens.
fn of_hooks_in(pid: u32) -> Option<String> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    let of_hooks = maps.lines().filter(|line| line.find("/memfd:").is_some_and(|at| blob_range(&line[at..]).is_some()));
    let hooks: HashSet<u64> = of_hooks.filter_map(|line| line.split_whitespace().nth(4)?.parse().ok()).collect();
    let network = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    let is_other = |pid: &u32| {
        let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        *pid != std::process::id() && comm.trim_end() == NAME && network(&pid.to_string()) == network("self")
    };
    let url = |pid: u32| listening(pid, &hooks).map(|address| format!("{}://{address}", scheme(pid)));
    all_pids().ok()?.into_iter().filter(is_other).find_map(url)
}

fn scheme(pid: u32) -> &'static str {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    if line.split(|byte| *byte == 0).any(|word| word.starts_with(TLS)) { "https" } else { "http" }
}

/// The address on which a heapbpf listens, if it has one of these hooks open. A heapbpf keeps those of its targets
/// open.
fn listening(pid: u32, hooks: &HashSet<u64>) -> Option<SocketAddr> {
    let (mut sockets, mut has_hooks) = (HashSet::new(), false);
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten().take(MOST) {
        let link = fs::read_link(entry.path()).unwrap_or_default();
        let link = link.to_string_lossy();
        let socket = link.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')?.parse::<u64>().ok());
        sockets.extend(socket);
        has_hooks |=
            blob_range(&link).is_some() && fs::metadata(entry.path()).is_ok_and(|it| hooks.contains(&it.ino()));
    }
    let open = |table: &&str| File::open(format!("/proc/{pid}/net/{table}")).ok();
    let tables = ["tcp", "tcp6"].iter().filter(|_| has_hooks).filter_map(open);
    let mut lines = tables.flat_map(|table| BufReader::new(table).lines().map_while(Result::ok).take(MOST));
    lines.find_map(|line| listener(&line).filter(|(_, inode)| sockets.contains(inode)).map(|(address, _)| address))
}

/// Address and inode of a listening socket, from a line of `/proc/net/tcp` or `tcp6`. A socket that listens on all
/// addresses is reached on this host.
fn listener(line: &str) -> Option<(SocketAddr, u64)> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (address, port) = fields.get(1)?.split_once(':')?;
    let word = |at: usize| Some(u32::from_str_radix(address.get(at..at + 8)?, 16).ok()?.to_ne_bytes());
    let ip: IpAddr = match address.len() {
        8 => word(0)?.into(),
        32 => <[u8; 16]>::try_from([word(0)?, word(8)?, word(16)?, word(24)?].concat()).ok()?.into(),
        _ => return None,
    };
    let ip = match ip {
        IpAddr::V4(any) if any.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(any) if any.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    let socket = SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?);
    (*fields.get(3)? == LISTENS).then_some((socket, fields.get(9)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_that_listen_are_found_by_their_inodes() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let table = fs::read_to_string("/proc/self/net/tcp").unwrap();
        let found = table.lines().filter_map(super::listener).find(|(found, _)| *found == address);
        assert!(found.is_some_and(|(_, inode)| inode > 0), "{table}");
        // Without hooks, nothing is found.
        assert_eq!(listening(std::process::id(), &HashSet::new()), None);
        assert_eq!((of_hooks_in(std::process::id()), scheme(std::process::id())), (None, "http"));
        assert_eq!(pointer_to(std::process::id()), "");
        let of = |address: &str, state: &str| {
            super::listener(&format!("0: {address} 0:0 {state} 0:0 00:0 0 0 0 77 1"))
                .map(|(address, _)| address.to_string())
        };
        assert_eq!(of("0100007F:17AC", "0A").as_deref(), Some("127.0.0.1:6060"));
        assert_eq!(of("00000000:17AC", "0A").as_deref(), Some("127.0.0.1:6060"));
        assert_eq!(of("00000000000000000000000000000000:17AC", "0A").as_deref(), Some("[::1]:6060"));
        assert_eq!((of("0100007F:17AC", "01"), of("x:17AC", "0A"), of("", "")), (None, None, None));
    }
}
