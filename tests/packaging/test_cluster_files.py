"""The cluster files: what can be known of them without a cloud, a Kubernetes or a Docker daemon.

Ray's own code reads the YAML of `ray up`; each command line in them is read by the parser that it is
meant for. Nothing here says that they work: cluster/README.md marks what has never been run.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from p2pcache.cli import _parser
from p2pcache.config import NodeConfig, parse_settings

pytest.importorskip("ray")

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
RAY_UP = {
    "local": ROOT / "ray_cluster.yaml",
    "aws": CLUSTER / "aws-gpu.yaml",
    "gcp": CLUSTER / "gcp-gpu.yaml",
}
KUBERAY = CLUSTER / "kuberay.yaml"
CLOUD = ["aws", "gcp"]
HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
METRICS_PORT = 8080


# -- the files as commands -------------------------------------------------------------------------


def load(kind: str) -> dict[str, Any]:
    return yaml.safe_load(RAY_UP[kind].read_text())


def kuberay() -> dict[str, dict[str, Any]]:
    return {doc["kind"]: doc for doc in yaml.safe_load_all(KUBERAY.read_text())}


def pod_specs() -> dict[str, dict[str, Any]]:
    spec = kuberay()["RayCluster"]["spec"]
    (workers,) = spec["workerGroupSpecs"]
    return {"head": spec["headGroupSpec"]["template"]["spec"], "worker": workers["template"]["spec"]}


def ray_container(role: str) -> dict[str, Any]:
    (container,) = pod_specs()[role]["containers"]
    return container


def scripts(kind: str, role: str) -> list[str]:
    """The shell scripts that start Ray and the mesh there."""
    if kind == "kuberay":
        return ray_container(role)["args"]
    return load(kind)[f"{role}_start_ray_commands"]


def words_of(script: str, program: str) -> Iterator[list[str]]:
    """Each call of `program` in a script, as words: assignments before it, its name, what follows."""
    joined = script.replace("\\\n", " ").replace("\n", " ; ")
    lexer = shlex.shlex(joined, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    call: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set(";&|"):
            names = [Path(w).name for w in call]
            if program in names and names.index(program) <= len([w for w in call if "=" in w]) + 1:
                yield call
            call = []
        else:
            call.append(word)


def after(call: list[str], program: str) -> list[str]:
    return call[[Path(w).name for w in call].index(program) + 1 :]


def ray_starts(kind: str, role: str) -> list[list[str]]:
    calls = [c for s in scripts(kind, role) for c in words_of(s, "ray")]
    return [c for c in calls if after(c, "ray")[0] == "start"]


KINDS = [*RAY_UP, "kuberay"]


def test_calls_are_found_in_scripts() -> None:
    script = (
        'a=1 B=2 ~/v/bin/ray start --x=1 &\nuntil p2pcache start --y \\\n --z "q r"\ndo\n sleep 1\ndone\n'
    )
    assert list(words_of(script, "ray")) == [["a=1", "B=2", "~/v/bin/ray", "start", "--x=1"]]
    assert list(words_of(script, "p2pcache")) == [["until", "p2pcache", "start", "--y", "--z", "q r"]]
    assert list(words_of("ulimit -n 9; ray stop", "ray")) == [["ray", "stop"]]


# -- `ray up` --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RAY_UP)
def test_ray_accepts_the_file(kind: str) -> None:
    """As `ray up` does: read, fill in Ray's defaults, then the schema and the rules beside it."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(load(kind))
    validate_config(prepared)
    hosts = prepared["available_node_types"].values()
    # The autoscaler must have nothing to scale.
    assert sum(t["min_workers"] for t in hosts) == prepared["max_workers"]
    assert all(t["min_workers"] == t["max_workers"] for t in hosts)


@pytest.mark.parametrize("kind", RAY_UP)
def test_a_misspelt_field_is_not_accepted(kind: str) -> None:
    import jsonschema
    from ray.autoscaler._private.util import prepare_config, validate_config

    with pytest.raises(jsonschema.ValidationError, match="setup_comands"):
        validate_config(prepare_config(load(kind) | {"setup_comands": []}))


def test_ray_bootstraps_the_local_file() -> None:
    from ray.autoscaler._private.local.config import bootstrap_local
    from ray.autoscaler._private.util import prepare_config

    prepared = prepare_config(load("local"))
    assert bootstrap_local(prepared) == prepared
    assert prepared["max_workers"] == len(prepared["provider"]["worker_ips"])


def test_efa_interfaces_are_given_as_ray_wants_them() -> None:
    """Ray's AWS bootstrap raises ValueError otherwise; it cannot be imported without boto3."""
    node = load("aws")["available_node_types"]["gpu"]["node_config"]
    interfaces = node["NetworkInterfaces"]
    assert {i["InterfaceType"] for i in interfaces} == {"efa"}
    assert not {"SubnetId", "SubnetIds", "SecurityGroupIds"} & node.keys()
    assert all(i["SubnetId"] and i["Groups"] for i in interfaces)


def test_ray_reads_the_efa_interfaces() -> None:
    pytest.importorskip("boto3")
    from ray.autoscaler._private.aws.config import _configure_from_network_interfaces

    node = _configure_from_network_interfaces(load("aws"))["available_node_types"]["gpu"]["node_config"]
    assert node["SubnetIds"] == [i["SubnetId"] for i in node["NetworkInterfaces"]]
    assert node["SecurityGroupIds"] == [g for i in node["NetworkInterfaces"] for g in i["Groups"]]


@pytest.mark.parametrize("kind", CLOUD)
def test_the_autoscaler_on_the_head_has_its_cloud_library(kind: str) -> None:
    library = {"aws": "boto3", "gcp": "google-api-python-client"}[kind]
    assert any(library in command for command in load(kind)["head_setup_commands"])


@pytest.mark.parametrize("kind", CLOUD)
def test_hosts_have_no_public_address(kind: str) -> None:
    """The sockets are not encrypted."""
    config = load(kind)
    assert config["provider"]["use_internal_ips"] is True
    (node,) = [t["node_config"] for t in config["available_node_types"].values()]
    for interface in node.get("NetworkInterfaces", []) + node.get("networkInterfaces", []):
        assert not interface.keys() & {"AssociatePublicIpAddress", "accessConfigs"}
    assert "NOT encrypted" in RAY_UP[kind].read_text()


def test_gcp_places_disks_and_networks_where_the_hosts_are() -> None:
    config = load("gcp")
    zone, region = (config["provider"][k] for k in ("availability_zone", "region"))
    node = config["available_node_types"]["gpu"]["node_config"]
    scratch = [d["initializeParams"]["diskType"] for d in node["disks"] if d["type"] == "SCRATCH"]
    assert scratch and all(d == f"zones/{zone}/diskTypes/local-ssd" for d in scratch)
    assert all(f"/regions/{region}/" in n["subnetwork"] for n in node["networkInterfaces"])
    assert node["scheduling"]["onHostMaintenance"] == "TERMINATE"


@pytest.mark.parametrize("kind", RAY_UP)
def test_only_the_repository_is_copied_and_not_what_is_built(kind: str) -> None:
    config = load(kind)
    assert config["file_mounts"] == {"~/p2pcache": "."}
    assert {".venv", ".cache", ".git", "build", "out"} <= set(config["rsync_exclude"])


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("kind", KINDS)
def test_shell_commands_are_well_formed(kind: str) -> None:
    if kind == "kuberay":
        found = [s for role in ("head", "worker") for s in scripts(kind, role)]
        found.append(ray_container("worker")["readinessProbe"]["exec"]["command"][2])
    else:
        found = [c for key, value in load(kind).items() if key.endswith("_commands") for c in value]
    for script in found:
        done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True, timeout=10)
        assert (done.returncode, done.stderr) == (0, ""), script


# -- the command lines in every file ---------------------------------------------------------------


@pytest.mark.parametrize("role", ["head", "worker"])
@pytest.mark.parametrize("kind", KINDS)
def test_ray_start_knows_every_option(kind: str, role: str) -> None:
    from ray.scripts.scripts import start

    (call,) = ray_starts(kind, role)
    arguments = after(call, "ray")[1:]
    known = {name for parameter in start.params for name in parameter.opts}
    assert {a.split("=")[0] for a in arguments} <= known
    start.make_context("start", list(arguments))  # takes the values as well; starts nothing


@pytest.mark.parametrize("kind", KINDS)
def test_p2pcache_start_is_understood_to_the_last_setting(kind: str) -> None:
    calls = [c for s in scripts(kind, "head") for c in words_of(s, "p2pcache")]
    (call,) = calls
    arguments = _parser().parse_args(after(call, "p2pcache"))
    assert arguments.command == "start" and not arguments.alone and not arguments.all_nodes
    pairs = dict(text.split("=", 1) for text in arguments.set)
    assert pairs.pop("host") == "node-ip"
    config = NodeConfig.of(parse_settings(pairs) | {"host": "10.0.0.1"}, environ={})
    assert config.allow_plaintext_network
    if kind != "local":
        assert config.nvme_path == "/mnt/nvme/p2pcache"


@pytest.mark.parametrize("kind", KINDS)
def test_the_label_is_what_p2pcache_looks_for(kind: str) -> None:
    from p2pcache.io.members_ray import LABEL

    (worker,) = ray_starts(kind, "worker")
    assert f"--labels={LABEL}=1" in worker
    (head,) = ray_starts(kind, "head")
    # Where nothing tries again, `p2pcache start` needs a member at once.
    assert (f"--labels={LABEL}=1" in head) == (kind != "kuberay")


@pytest.mark.parametrize("role", ["head", "worker"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_metrics_port_is_fixed(kind: str, role: str) -> None:
    (call,) = ray_starts(kind, role)
    assert f"--metrics-export-port={METRICS_PORT}" in call


@pytest.mark.parametrize("kind", ["local", *CLOUD])
def test_serve_and_a_ucx_for_the_same_cuda_as_torch_are_installed(kind: str) -> None:
    assert any("'.[serve,ucx-cu13]'" in command for command in load(kind)["setup_commands"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_learns_of_a_dead_host_within_seconds(kind: str) -> None:
    if kind == "kuberay":
        found = {e["name"]: e["value"] for e in ray_container("head")["env"]}
    else:
        (call,) = ray_starts(kind, "head")
        found = dict(word.split("=", 1) for word in call if word.startswith("RAY_health_"))
    assert found == HEALTH


def test_ray_has_the_health_settings() -> None:
    from ray._raylet import Config

    for name in HEALTH:
        assert isinstance(getattr(Config, name.removeprefix("RAY_"))(), int)


# -- Kubernetes ------------------------------------------------------------------------------------

# Names from the custom resource (KubeRay 1.1 and later) and from Kubernetes' API.
FIELDS = {
    "RayCluster": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"},
    "headGroupSpec": {"serviceType", "rayStartParams", "template"},
    "workerGroupSpec": {
        "groupName",
        "replicas",
        "minReplicas",
        "maxReplicas",
        "rayStartParams",
        "template",
    },
    "pod": {
        "affinity",
        "containers",
        "initContainers",
        "securityContext",
        "terminationGracePeriodSeconds",
        "tolerations",
        "volumes",
    },
    "container": {
        "args",
        "command",
        "env",
        "image",
        "livenessProbe",
        "name",
        "ports",
        "readinessProbe",
        "resources",
        "securityContext",
        "volumeMounts",
    },
    "probe": {
        "exec",
        "failureThreshold",
        "httpGet",
        "initialDelaySeconds",
        "periodSeconds",
        "timeoutSeconds",
    },
}
QUANTITY = re.compile(r"[0-9]+(Mi|Gi|m)?")


def test_the_manifest_is_of_the_right_kinds() -> None:
    documents = kuberay()
    versions = {kind: doc["apiVersion"] for kind, doc in documents.items()}
    assert versions == {"RayCluster": "ray.io/v1", "NetworkPolicy": "networking.k8s.io/v1"}
    cluster = documents["RayCluster"]
    assert cluster.keys() == FIELDS["RayCluster"]
    assert cluster["spec"].keys() <= FIELDS["spec"]
    assert cluster["spec"]["headGroupSpec"].keys() <= FIELDS["headGroupSpec"]
    for group in cluster["spec"]["workerGroupSpecs"]:
        assert group.keys() <= FIELDS["workerGroupSpec"]
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
    # Without it the operator would put a `ray start` of its own in front of the commands.
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"


def test_the_manifest_names_the_ray_of_the_image() -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    assert kuberay()["RayCluster"]["spec"]["rayVersion"] == pinned["ray"]


@pytest.mark.parametrize("role", ["head", "worker"])
def test_pods_have_only_fields_that_exist(role: str) -> None:
    pod = pod_specs()[role]
    assert pod.keys() <= FIELDS["pod"]
    volumes = {v["name"] for v in pod["volumes"]}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert container.keys() <= FIELDS["container"]
        assert {m["name"] for m in container.get("volumeMounts", [])} <= volumes
        assert not container["image"].endswith(":latest") and ":" in container["image"]
        for word in [*container["command"], *container.get("args", [])]:
            assert isinstance(word, str)  # an unquoted number would be refused
        for key in ("readinessProbe", "livenessProbe"):
            assert container.get(key, {}).keys() <= FIELDS["probe"]
        for amounts in container.get("resources", {}).values():
            assert all(QUANTITY.fullmatch(amount) for amount in amounts.values())


@pytest.mark.parametrize("role", ["head", "worker"])
def test_pods_have_shared_memory_probes_and_a_metrics_port(role: str) -> None:
    pod, container = pod_specs()[role], ray_container(role)
    (name,) = [m["name"] for m in container["volumeMounts"] if m["mountPath"] == "/dev/shm"]
    (shm,) = [v["emptyDir"] for v in pod["volumes"] if v["name"] == name]
    assert shm["medium"] == "Memory" and shm["sizeLimit"]
    assert {"readinessProbe", "livenessProbe"} <= container.keys()
    assert {"name": "metrics", "containerPort": METRICS_PORT} in container["ports"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000}


def test_the_worker_has_memory_for_the_slab_and_a_place_for_the_log() -> None:
    (call,) = [c for s in scripts("kuberay", "head") for c in words_of(s, "p2pcache")]
    pairs = dict(text.split("=", 1) for text in _parser().parse_args(after(call, "p2pcache")).set)
    worker = ray_container("worker")
    limit = int(worker["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    (shm,) = [v["emptyDir"]["sizeLimit"] for v in pod_specs()["worker"]["volumes"] if v["name"] == "shm"]
    assert int(pairs["host_bytes_max"]) + (int(shm.removesuffix("Gi")) << 30) < limit
    mounts = [m["mountPath"] for m in worker["volumeMounts"]]
    assert any(Path(pairs["nvme_path"]).is_relative_to(mount) for mount in mounts)


def test_the_probes_ask_where_ray_listens_and_where_the_node_puts_its_socket() -> None:
    from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT

    for role in ("head", "worker"):
        probe = ray_container(role)["livenessProbe"]["httpGet"]
        assert probe == {"path": "/api/healthz", "port": DEFAULT_DASHBOARD_AGENT_LISTEN_PORT}
    # p2pcache.runtime._runtime_folder with neither runtime_dir nor XDG_RUNTIME_DIR set.
    script = ray_container("worker")["readinessProbe"]["exec"]["command"][2]
    assert script == 'compgen -G "/tmp/p2pcache-$(id -u)/*.sock"'


def test_the_policy_lets_in_the_clusters_own_pods_and_the_metrics_port() -> None:
    documents = kuberay()
    policy = documents["NetworkPolicy"]["spec"]
    ours = {"matchLabels": {"ray.io/cluster": documents["RayCluster"]["metadata"]["name"]}}
    assert policy["podSelector"] == ours and policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [
        {"from": [{"podSelector": ours}]},
        {"ports": [{"port": METRICS_PORT, "protocol": "TCP"}]},
    ]


# -- the image -------------------------------------------------------------------------------------

COMPILERS = {"gcc", "g++", "build-essential", "clang", "cmake"}


def stages() -> dict[str, dict[str, Any]]:
    """Name -> base, instructions as (name, rest), in the order of the file."""
    text = re.sub(r"^\s*#.*\n", "", (CLUSTER / "Dockerfile").read_text(), flags=re.M)
    text = text.replace("\\\n", " ")
    found: dict[str, dict[str, Any]] = {}
    arguments: dict[str, str] = {}
    current: list[tuple[str, str]] = []
    for line in filter(str.strip, text.splitlines()):
        name, _, rest = line.strip().partition(" ")
        if name == "ARG" and not found:
            key, _, value = rest.partition("=")
            arguments[key] = value
        elif name == "FROM":
            base, word, stage = rest.split()
            assert word == "AS"
            for key, value in arguments.items():
                base = base.replace(f"${{{key}}}", value)
            current = []
            found[stage] = {"base": base, "does": current}
        else:
            current.append((name, " ".join(rest.split())))
    return found


def lineage(stage: str) -> list[tuple[str, str]]:
    """What a stage does, behind what its base stages do."""
    every = stages()
    does = copy.copy(every[stage]["does"])
    while (stage := every[stage]["base"]) in every:
        does = [*every[stage]["does"], *does]
    return does


def installed_by_apt(stage: str) -> set[str]:
    runs = [rest for name, rest in lineage(stage) if name == "RUN"]
    lists = [m for run in runs for m in re.findall(r"apt-get install ([^&]*)", run)]
    return {word for words in lists for word in words.split() if not word.startswith("-")}


def test_the_dockerfile_has_its_targets_and_every_stage_a_pinned_base() -> None:
    every = stages()
    assert {"p2pcache", "p2pcache-vllm"} <= every.keys()
    for name, stage in every.items():
        if stage["base"] in every:
            assert list(every).index(stage["base"]) < list(every).index(name)
        else:
            assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", stage["base"])
        assert {instruction for instruction, _ in stage["does"]} <= {
            "ARG",
            "CMD",
            "COPY",
            "ENV",
            "RUN",
            "USER",
            "WORKDIR",
        }


@pytest.mark.parametrize("target", ["p2pcache", "p2pcache-vllm"])
def test_images_do_not_run_as_root(target: str) -> None:
    does = lineage(target)
    assert [rest for name, rest in does if name == "USER"] == ["1000:1000"]
    behind = does[[name for name, _ in does].index("USER") :]
    assert [name for name, _ in behind] == ["USER", "CMD"]
    assert json.loads(behind[-1][1])[0] == "p2pcache"


def test_compilers_stay_behind_but_for_the_one_that_vllm_runs() -> None:
    assert "g++" in installed_by_apt("builder")
    assert not installed_by_apt("p2pcache")
    assert installed_by_apt("p2pcache-vllm") & COMPILERS == {"gcc"}


def test_what_the_dockerfile_copies_exists_and_is_not_ignored() -> None:
    patterns = [p for p in (ROOT / ".dockerignore").read_text().split("\n") if p and not p.startswith("#")]
    assert patterns[0] == "*"
    kept = {p.removeprefix("!") for p in patterns if p.startswith("!")}
    every = stages()
    copied: set[str] = set()
    for stage in every.values():
        for name, rest in stage["does"]:
            if name != "COPY":
                continue
            *sources, _ = rest.split()
            if sources[0].startswith("--from="):
                assert sources[0].removeprefix("--from=") in every
            else:
                copied |= set(sources)
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)


def test_the_builder_has_what_the_build_reads() -> None:
    copied = {w for name, rest in stages()["builder"]["does"] if name == "COPY" for w in rest.split()[:-1]}
    assert {"pyproject.toml", "README.md", "LICENSE", "native", "p2pcache"} <= copied


def test_the_images_install_extras_that_exist() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for stage in ("install", "install-vllm"):
        (run,) = [rest for name, rest in stages()[stage]["does"] if name == "RUN"]
        (names,) = re.findall(r'whl\)\[([^]]*)\]"', run)
        assert set(names.split(",")) <= extras.keys()
        assert "--only-binary=:all:" in run


def test_the_constraints_that_images_leave_out_exist() -> None:
    """A filter that no longer matches would leave the conflict that it is there for."""
    names = [line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().split() if "==" in line]
    assert {"numpy", "transformers", "tokenizers", "huggingface-hub"} <= set(names)


# -- what is said about them -----------------------------------------------------------------------


def test_the_readme_says_of_each_file_that_it_is_untested() -> None:
    readme = (CLUSTER / "README.md").read_text()
    for name in ("aws-gpu.yaml", "gcp-gpu.yaml", "kuberay.yaml", "Dockerfile"):
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{name}`"))
        assert "**untested**" in row
    for path in (RAY_UP["aws"], RAY_UP["gcp"], KUBERAY):
        assert "Untested" in path.read_text()
