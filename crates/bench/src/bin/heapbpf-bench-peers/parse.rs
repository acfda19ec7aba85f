//! Parsers of the profilers' outputs: bytes allocated and in use, by call site.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use object::{Object, ObjectSymbol};
use serde_json::Value;

/// Estimated bytes of a call site; `None` if the profiler has no such estimate.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SiteBytes {
    /// Allocated.
    pub allocated: Option<f64>,
    /// In use at the end.
    pub in_use: Option<f64>,
}

/// Estimates by the name of the call site.
pub type Sites = BTreeMap<String, SiteBytes>;

fn add(sites: &mut Sites, site: &str, allocated: Option<f64>, in_use: Option<f64>) {
    let sums = sites.entry(site.to_owned()).or_default();
    let sum = |into: &mut Option<f64>, more: Option<f64>| {
        if let Some(more) = more {
            *into = Some(into.unwrap_or(0.0) + more);
        }
    };
    sum(&mut sums.allocated, allocated);
    sum(&mut sums.in_use, in_use);
}

/// The first `site_NN` in a text.
fn site_in(text: &str) -> Option<&str> {
    let at = text.find("site_")?;
    text.get(at..at + 7).filter(|name| name.as_bytes()[5..].iter().all(u8::is_ascii_digit))
}

/// Our own JSON profile of one process.
pub fn heapbpf(profile: &Value) -> Sites {
    let mut sites = Sites::new();
    for stack in profile["stacks"].as_array().into_iter().flatten() {
        let frames = stack["frames"].as_array().into_iter().flatten();
        let Some(site) = frames.filter_map(|frame| site_in(frame["function"].as_str()?)).next() else { continue };
        add(&mut sites, site, stack["alloc_bytes"]["estimate"].as_f64(), stack["inuse_bytes"]["estimate"].as_f64());
    }
    sites
}

/// The last list of outstanding allocations that bcc's memleak printed:
/// `\t4000 bytes in 40 allocations from stack`, then frames.
pub fn memleak(output: &str) -> Sites {
    let mut sites = Sites::new();
    let last = output.rsplit("stacks with outstanding allocations:").next().unwrap_or_default();
    let mut bytes = None;
    for line in last.lines() {
        if line.contains(" allocations from stack") {
            bytes = line.split_whitespace().next().and_then(|word| word.parse::<f64>().ok());
        } else if let (Some(some), Some(site)) = (bytes, site_in(line)) {
            add(&mut sites, site, None, Some(some));
            bytes = None;
        }
    }
    sites
}

/// The maps `@bytes` and `@freed` of our bpftrace script, by stack: `@bytes[`, frames, `]: 4000`.
pub fn bpftrace(output: &str) -> Sites {
    let mut sites = Sites::new();
    let (mut map, mut site) = ("", None);
    for line in output.lines() {
        if let Some(name) = line.strip_prefix('@').and_then(|line| line.split('[').next()) {
            (map, site) = (name, None);
        }
        if let Some(value) = line.strip_prefix("]: ").and_then(|value| value.parse::<f64>().ok()) {
            match (map, site) {
                ("bytes", Some(site)) => add(&mut sites, site, Some(value), Some(value)),
                ("freed", Some(site)) => add(&mut sites, site, None, Some(-value)),
                _ => {}
            }
        }
        site = site.or_else(|| site_in(line));
    }
    sites
}

/// Folded stacks with a number, as heaptrack_print writes them.
pub fn folded(text: &str, in_use: bool) -> Sites {
    let mut sites = Sites::new();
    for line in text.lines() {
        let Some((stack, value)) = line.rsplit_once(' ') else { continue };
        if let (Some(site), Ok(value)) = (site_in(stack), value.parse::<f64>()) {
            let (allocated, in_use) = if in_use { (None, Some(value)) } else { (Some(value), None) };
            add(&mut sites, site, allocated, in_use);
        }
    }
    sites
}

/// Functions of a program at fixed addresses, to symbolize addresses.
pub struct Names(Vec<(u64, String)>);

impl Names {
    /// Reads the symbols of a program; none if it cannot be read.
    pub fn read(program: &Path) -> Self {
        let bytes = fs::read(program).unwrap_or_default();
        let mut names: Vec<(u64, String)> = object::File::parse(&*bytes)
            .map(|file| {
                let functions = file.symbols().filter(|symbol| symbol.is_definition());
                functions.filter_map(|symbol| Some((symbol.address(), symbol.name().ok()?.to_owned()))).collect()
            })
            .unwrap_or_default();
        names.sort();
        Self(names)
    }

    fn site(&self, address: u64) -> Option<&str> {
        let after = self.0.partition_point(|(start, _)| *start <= address);
        site_in(&self.0[after.checked_sub(1)?].1)
    }
}

/// A heap profile as jemalloc (`heap_v2/R`, counts on a line of their own) or gperftools (counts before the stack)
/// writes it. Sampled ones are unbiased as jeprof and pprof do it: 1/(1 − exp(−mean size/R)).
pub fn heap_text(text: &str, names: &Names, has_totals: bool) -> Sites {
    let mut lines = text.lines();
    let rate = lines.next().and_then(|first| first.split("heap_v2/").nth(1)?.trim().parse::<f64>().ok());
    let mut sites = Sites::new();
    let mut take = |numbers: &[f64], site: Option<&str>| {
        let ([live_count, live, count, bytes], Some(site)) = (numbers, site) else { return };
        let unbiased = |count: f64, bytes: f64| match rate {
            Some(rate) if count > 0.0 => bytes / -f64::exp_m1(-(bytes / count) / rate),
            _ => bytes,
        };
        let allocated = has_totals.then(|| unbiased(*count, *bytes));
        add(&mut sites, site, allocated, Some(unbiased(*live_count, *live)));
    };
    let numbers = |text: &str| -> Vec<f64> {
        text.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect()
    };
    let stack = |text: &str| -> Option<&str> {
        let addresses =
            text.split_whitespace().filter_map(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok());
        // These are return addresses: the address before one is inside the call.
        addresses.filter_map(|address| names.site(address - 1)).next()
    };
    let mut current = None;
    for line in lines {
        let line = line.trim();
        if let Some(addresses) = line.strip_prefix('@') {
            current = stack(addresses);
        } else if let Some(counts) = line.strip_prefix("t*:") {
            take(&numbers(counts), current.take());
        } else if let Some((counts, addresses)) = line.split_once('@') {
            take(&numbers(counts), stack(addresses));
        } else if line.starts_with("MAPPED_LIBRARIES") {
            break;
        }
    }
    sites
}
