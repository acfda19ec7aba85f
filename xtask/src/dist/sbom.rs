//! The machine-readable list of a release's parts: CycloneDX 1.6 (<https://cyclonedx.org/docs/1.6/json/>).
//!
//! It has no serial number, and its time is that of the source, so that the same source gives the same list.

use anyhow::Context as _;
use serde_json::{Value, json};

use super::Release;
use super::components::Component;

/// Returns the document. The first component is the whole that contains the others.
pub fn document(release: &Release, components: &[Component], time: &str) -> anyhow::Result<String> {
    let (whole, parts) = components.split_first().context("a release has components")?;
    let mut root = described(whole);
    root["type"] = json!("application");
    root["name"] = json!("heapbpf");
    root["version"] = json!(release.version);
    let dependencies: Vec<Value> =
        components.iter().map(|component| json!({ "ref": component.purl, "dependsOn": component.uses })).collect();
    let document = json!({
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": time,
            "tools": { "components": [{ "type": "application", "name": "cargo xtask dist", "version": release.version }] },
            "component": root,
        },
        "components": parts.iter().map(described).collect::<Vec<_>>(),
        "dependencies": dependencies,
    });
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}

fn described(component: &Component) -> Value {
    let mut value = json!({
        "type": "library",
        "bom-ref": component.purl,
        "name": component.name,
        "version": component.version,
        "scope": "required",
        "licenses": [{ "expression": component.licence }],
        "purl": component.purl,
    });
    if let Some(checksum) = &component.checksum {
        value["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
    }
    if let Some(repository) = &component.repository {
        value["externalReferences"] = json!([{ "type": "vcs", "url": repository }]);
    }
    value
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::dist::ARCHITECTURES;

    fn component(name: &str, uses: &[&str]) -> Component {
        Component {
            name: name.to_owned(),
            version: "1.0.0".to_owned(),
            licence: "MIT".to_owned(),
            purl: format!("pkg:cargo/{name}@1.0.0"),
            checksum: (name == "b").then(|| "0f".repeat(32)),
            uses: uses.iter().map(|name| format!("pkg:cargo/{name}@1.0.0")).collect(),
            is_own: name == "a",
            ..Component::default()
        }
    }

    #[test]
    fn every_part_is_listed_with_its_licence_and_what_it_uses() {
        let release =
            Release { version: "0.1.0".to_owned(), epoch: 0, architecture: ARCHITECTURES[0], out: PathBuf::from("/w") };
        let parts = [component("a", &["b"]), component("b", &[])];
        let text = document(&release, &parts, "1970-01-01T00:00:00Z").expect("it has components");
        let read: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(read["metadata"]["component"]["name"], "heapbpf");
        assert_eq!(read["components"].as_array().map(Vec::len), Some(1));
        assert_eq!(read["components"][0]["licenses"][0]["expression"], "MIT");
        assert_eq!(read["components"][0]["hashes"][0]["alg"], "SHA-256");
        assert_eq!(read["dependencies"][0], json!({ "ref": "pkg:cargo/a@1.0.0", "dependsOn": ["pkg:cargo/b@1.0.0"] }));
        assert!(document(&release, &[], "").is_err());
    }
}
