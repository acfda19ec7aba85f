//! What a process runs in: a container, a pod, a unit of systemd.

/// What a process runs in, as far as its control groups tell. Each text is empty if it runs in none, or if that is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Placement {
    /// ID of its innermost container, as the container engine shows it, in full.
    pub container: String,
    /// UID of its Kubernetes pod.
    pub pod: String,
    /// Its unit of systemd, for example `nginx.service`.
    pub unit: String,
}

impl Placement {
    /// Names and values of what is known, in a fixed order.
    pub fn known(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let all = [("container", &*self.container), ("pod", &*self.pod), ("unit", &*self.unit)];
        all.into_iter().filter(|(_, value)| !value.is_empty())
    }

    /// Keeps what `other` agrees with: what several processes run in.
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
