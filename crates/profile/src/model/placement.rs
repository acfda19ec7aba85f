//! Where a process runs: container, pod, systemd unit.

/// Where a process runs, as far as its cgroups tell. Each text is empty if there is none or if it is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Placement {
    /// Full ID of its innermost container, as the container engine shows it.
    pub container: String,
    /// UID of its Kubernetes pod.
    pub pod: String,
    /// Its systemd unit, for example `nginx.service`.
    pub unit: String,
}

impl Placement {
    /// Names and values of what is known, in a fixed order.
    pub fn known(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let all = [("container", &*self.container), ("pod", &*self.pod), ("unit", &*self.unit)];
        all.into_iter().filter(|(_, value)| !value.is_empty())
    }

    /// Keeps only what `other` agrees with: what several processes have in common.
    pub fn keep_common(&mut self, other: &Self) {
        for (own, other) in
            [(&mut self.container, &other.container), (&mut self.pod, &other.pod), (&mut self.unit, &other.unit)]
        {
            if own != other {
                own.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_unknown_is_left_out_and_what_differs_is_dropped() {
        let one = Placement { container: "c".into(), pod: String::new(), unit: "a.service".into() };
        assert_eq!(one.known().collect::<Vec<_>>(), [("container", "c"), ("unit", "a.service")]);
        let mut common = one.clone();
        common.keep_common(&one);
        assert_eq!(common, one);
        common.keep_common(&Placement { unit: "b.service".into(), ..one });
        assert_eq!(common.known().collect::<Vec<_>>(), [("container", "c")]);
    }
}
