//! The true allocations of a program, and how far a correct estimate may deviate from them.

use serde::Deserialize;

/// A program's report: exact, per process and call site.
#[derive(Clone, Debug, Deserialize)]
pub struct Truth {
    /// Number of allocation calls that returned NULL.
    pub failed: u64,
    /// Number of allocation calls that never returned.
    pub abandoned: u64,
    /// The truth per process and site.
    pub sites: Vec<Site>,
}

/// The truth about one call site in one process.
#[derive(Clone, Debug, Deserialize)]
pub struct Site {
    /// Process id.
    pub pid: u32,
    /// Function name, `site_NN`.
    pub site: String,
    /// Number of successful allocations.
    pub allocs: u64,
    /// Bytes that these allocations requested.
    pub bytes: u64,
    /// Number of allocations not freed when the report was written.
    pub live_allocs: u64,
    /// Bytes of the allocations that were not freed.
    pub live_bytes: u64,
    /// `[size in bytes, allocations, live allocations]` for each distinct size.
    pub sizes: Vec<[u64; 3]>,
}

impl Truth {
    /// The report in the output of a command that heapbpf has started.
    ///
    /// # Panics
    /// If there is none.
    pub fn in_output(text: &str) -> Self {
        let line = text.lines().find(|line| line.starts_with('{')).unwrap_or_else(|| panic!("no report in {text:?}"));
        serde_json::from_str(line).expect("a report")
    }

    /// Number of successful allocations at all sites.
    pub fn allocs(&self) -> u64 {
        self.sites.iter().map(|site| site.allocs).sum()
    }

    /// Bytes requested at all sites.
    pub fn bytes(&self) -> u64 {
        self.sites.iter().map(|site| site.bytes).sum()
    }

    /// Number of blocks not freed, at all sites.
    pub fn live_allocs(&self) -> u64 {
        self.sites.iter().map(|site| site.live_allocs).sum()
    }

    /// Bytes of the blocks not freed, at all sites.
    pub fn live_bytes(&self) -> u64 {
        self.sites.iter().map(|site| site.live_bytes).sum()
    }

    /// The truth about a site, over all processes.
    ///
    /// # Panics
    /// If the program never reached that site.
    pub fn site(&self, name: &str) -> &Site {
        self.sites.iter().find(|site| site.site == name).unwrap_or_else(|| panic!("nothing was allocated at {name}"))
    }
}

impl Site {
    /// Distribution of the estimates of what was allocated, or of what is live.
    pub fn law(&self, interval: u64, live: bool) -> Law {
        Law::of(self.sizes.iter().map(|&[size, allocs, alive]| (size, if live { alive } else { allocs })), interval)
    }
}

/// Probability that an allocation of `size` bytes is sampled at interval R: 1 − (1 − 1/R)^max(size, 1).
pub fn sampled_share(size: u64, interval: u64) -> f64 {
    if interval == 1 {
        return 1.0;
    }
    -f64::exp_m1(size.max(1) as f64 * f64::ln_1p(-1.0 / interval as f64))
}

/// A sum estimated from samples: its true value, the variance of the estimate, and the largest single term.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sum {
    /// True value.
    pub truth: f64,
    /// Variance of Σ (value/P) over the sampled allocations: Σ value² (1 − P)/P over *all* allocations.
    pub variance: f64,
    /// Maximum by which one allocation can move the estimate away from its own value.
    pub step: f64,
}

impl Sum {
    fn add(&mut self, value: f64, share: f64, times: f64) {
        self.truth += value * times;
        self.variance += value * value * (1.0 - share) / share * times;
        self.step = self.step.max(value * (1.0 / share - 1.0).max(if share < 1.0 { 1.0 } else { 0.0 }));
    }

    /// Largest tolerated deviation of the estimate. A correct estimate exceeds it with probability at most
    /// `FALSE_ALARM`, by Bernstein's inequality for independent bounded terms, P(|S| ≥ t) ≤ 2 exp(−t²/2 / (V +
    /// step·t/3)). Unlike a normal approximation, it holds for every mix of sizes and any number of samples. With many
    /// samples it is about 5.5 σ.
    pub fn tolerance(&self) -> f64 {
        let l = (2.0 / FALSE_ALARM).ln();
        let half = self.step * l / 3.0;
        half + (half * half + 2.0 * self.variance * l).sqrt()
    }
}

/// Largest probability that one check rejects a correct estimate: that of a two-sided test at 5 σ. A full run makes
/// about 1,000 such checks. Seeds are fixed, so single-threaded programs get the same draws every time.
pub const FALSE_ALARM: f64 = 5.7e-7;

/// Distributions of the estimates for a set of allocations.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Law {
    /// Bytes.
    pub bytes: Sum,
    /// Objects.
    pub objects: Sum,
    /// Number of samples taken (no weights): a sum of Bernoulli draws.
    pub samples: Sum,
}

impl Law {
    /// Distributions for allocations given as (size in bytes, count), at sampling interval R ≥ 1.
    pub fn of(sizes: impl IntoIterator<Item = (u64, u64)>, interval: u64) -> Self {
        Self::with_shares(sizes, |size| sampled_share(size, interval))
    }

    /// Distributions where a size is sampled with probability `share(size)`.
    pub fn with_shares(sizes: impl IntoIterator<Item = (u64, u64)>, share: impl Fn(u64) -> f64) -> Self {
        let mut law = Self::default();
        for (size, times) in sizes.into_iter().filter(|&(_, times)| times > 0) {
            let (share, times) = (share(size), times as f64);
            law.bytes.add(size as f64, share, times);
            law.objects.add(1.0, share, times);
            law.samples.truth += share * times;
            law.samples.variance += share * (1.0 - share) * times;
            law.samples.step = if law.samples.variance > 0.0 { 1.0 } else { 0.0 };
        }
        law
    }
}
