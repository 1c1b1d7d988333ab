"""The names that reports give their figures: "train.micro_batch_size", "32-way data parallelism", "Waves Per SM"."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Name:
    """`kinds` of its figures ("n": a count or a plain number), the `key`'s form, and what sentences `said`: for a
    count a form with one group for it, for others a form of the words around the figure."""

    kinds: str
    key: str
    said: str = ""
    most: float = math.inf
    least: float = 0.0


_N = r"(\d[\d,]*(?:\.\d+)?[kKM]?)"
_MEAN = r"(?:mean|average|avg)"
_OPTIMIZER = r"(?:optimi[sz]er |train(?:ing)? |gradient )?"
_SIZE = r"(?: size| degree| world size)?"
_BATCH = r"(?:train )?batch(?: size)?"
_PARALLEL = r"(?: model)? parallel(?:ism)?"
_PASS = r"(?:target |verif\w+ |forward |decod\w+ )?(?:step|pass|round|verif\w*|forward|iteration|cycle)"
_ACCURACY = r"(?: acc(?:uracy)?)?"
NAMES = {
    # how a model is trained
    "tp": Name("n", rf"tp{_SIZE}|parallel tensor|tensor{_PARALLEL}{_SIZE}", rf"{_N}-way tensor|\bTP ?[=:]? ?{_N}\b"),
    "pp": Name(
        "n",
        rf"pp{_SIZE}|parallel pipeline|pipeline{_PARALLEL}{_SIZE}|(?:num )?(?:pipeline )?stages|p",
        rf"{_N} (?:pipeline )?stages|{_N}-way pipeline|\bPP ?[=:]? ?{_N}\b|\bp ?= ?{_N} stages",
    ),
    "dp": Name("n", rf"dp{_SIZE}|parallel data|data{_PARALLEL}{_SIZE}", rf"{_N}-way data|\bDP ?[=:]? ?{_N}\b"),
    "cp": Name("n", rf"cp{_SIZE}|context{_PARALLEL}{_SIZE}", rf"{_N}-way context|\bCP ?[=:]? ?{_N}\b"),
    "ep": Name("n", rf"ep{_SIZE}|expert parallel(?:ism)?{_SIZE}", rf"{_N}-way expert|\bEP ?[=:]? ?{_N}\b"),
    "world": Name(
        "n",
        r"world size|(?:num |total |n )?(?<!kwh )(?:gpus|ranks)",
        rf"(?<![x×] )(?<!with )(?<!of ){_N} (?:(?:[A-Z][\w-]+|\d+ ?GB) ){{0,5}}(?:GPUs|ranks)\b"
        r"(?! (?:per|each|in each|on each))",
    ),
    "micro": Name(
        "n",
        rf"(?:train )?micro ?{_BATCH}|mbs|per (?:device|gpu) {_BATCH}|{_BATCH} per (?:device|gpu)",
        rf"(?i)micro-?batch(?:es)?(?: size)?(?: of| is)? {_N}\b",
    ),
    "accum": Name(
        "n",
        r"(?:train )?(?:grad(?:ient)? ?)?acc(?:um(?:ulation)?)?(?: steps)?",
        rf"(?i)accumulat\w+(?: steps)?(?: of| is| over)? {_N}\b",
    ),
    "global_batch": Name(
        "n",
        rf"global ?{_BATCH}|gbs|(?:total|effective) {_BATCH}",
        rf"(?i)global batch(?: size)?(?: of| is)? {_N}\b(?! (?:M )?tokens)",
    ),
    "steps": Name(
        "n",
        r"(?<!max )(?<!total )(?<!num )(?<!warmup )(?<!per )(?<!at )(?<!after )(?:steps?|iterations?)",
        rf"(?i){_N} {_OPTIMIZER}(?:steps|iterations|updates)\b(?! (?:per|of warm|warm))",
    ),
    "seq_len": Name("n", r"(?:max )?(?:seq(?:uence)?|context)(?: len(?:gth)?)?|seqlen|block size"),
    "step_tokens": Name(
        "n token/item",
        r"(?:global )?batch(?: size)? tokens|tokens (?:per|/) ?(?:step|batch|update|iter(?:ation)?)(?: will be)?",
        rf"(?i)\bbatch(?: size)?(?: of| is|:)? {_N} tokens\b|{_N} tokens (?:per|a|each) (?:\w+ )?(?:step|batch|update)",
    ),
    "tokens_seen": Name(
        "n tokens", r"tokens (?:seen|consumed|processed|trained)(?: on)?|consumed tokens", r"(?i)tokens", least=1e9
    ),
    "samples_seen": Name("n items", r"consumed (?:samples|sequences)"),
    "nll": Name("n", r"(?:eval |val |valid |test |train )?(?:nll|(?:lm |ce |cross entropy )?loss)(?: nats)?"),
    "ppl": Name("n", r"(?:eval |val |valid |test |train )?(?:ppl|perplexity)"),
    # models
    "params": Name("n", r"(?:n |num |total |trainable )*(?:model )?(?:param(?:eter)?s?)(?: count)?", least=1e6),
    "experts": Name(
        "n", r"experts", rf"(?i){_N} (?:routed )?experts\b(?! (?:per|on|in) (?:\w+ )?(?:gpu|rank|device|card|node))"
    ),
    "topk": Name("n", r"top k|experts per tok(?:en)?", rf"\btop-?{_N}\b|{_N} of (?:the )?\d+ (?:routed )?experts\b"),
    "layer_tokens": Name(
        "n",
        r"^(?:num |n |batch |total )?tokens",
        rf"(?i)(?:[x×] |--(?:num-)?tokens[ =]|\ba batch of ){_N}\b|{_N} tokens (?:per|a) step|"
        rf"{_N} tokens\b(?! per| for each)(?=[^.;]{{0,30}} expert)",
    ),
    "expert_load": Name(
        "n",
        r"^(?:mean |avg |average )?(?:tokens|rows|toks?)(?: ?/ ?| per )expert",
        rf"(?:each|every|an) expert (?:gets?|sees|receives|has|computes) (?:about )?{_N} (?:tokens|rows)\b|"
        rf"(?:so|that is|i\.e\.|=|or|→|tokens[,:]) {_N} (?:tokens |rows )?(?:per|for each) expert|"
        rf"(?:average|mean)(?: load)?[^.;\d]{{0,16}} {_N} (?:token|cop)[^.;]* (?:per|each) expert|"
        rf"(?:average|mean) over (?:the|all) \d+ experts (?:is|was|of) {_N} ",
    ),
    "compression": Name("ratio", r"(?:compression )?(?:ratio|compression)(?: vs| over| to)? (?:fp16|bf16)"),
    "eta": Name("time", "(?!)", r"(?i)\b(?:eta|remaining|left)[ :=]+(\d+:\d\d:\d\d)\b"),
    "step_now": Name("n", "(?!)", r"(?i)\b(?:step|iter\w*):? (\d+) ?/ ?\d+"),
    "last_step": Name("n", "(?!)", r"(?i)\b(?:step|iter\w*):? \d+ ?/ ?(\d+)"),
    "step_seconds": Name("s_per_item", r"step time|time per step", r"/ ?(?:step|it)"),
    # serving
    "benchmark_time": Name("time", r"^(?:benchmark )?duration(?: s)?|^elapsed(?: time)?"),
    "tokens_in": Name("n", r"^total (?:num )?(?:input|prompt) tokens"),
    "tokens_out": Name("n", r"^total (?:num )?(?:generated|output) tokens"),
    "total_rate": Name("tokens_per_s", r"^total token throughput(?: tok/s)?"),
    "output_rate": Name("tokens_per_s", r"^output (?:token )?throughput(?: tok/s)?", r"\boutput tok"),
    "cache_tokens": Name("n tokens", r"(?:gpu )?kv cache size|kv cache tokens"),
    "longest": Name("n", "(?!)", rf"(?i)concurrency for {_N} tokens"),
    "concurrency": Name("ratio", r"tokens per request"),
    "ttft": Name("time", r"ttft", r"(?i)\bttft\b|time to (?:the )?first token"),
    "tpot": Name("time s_per_token", r"tpot|itl", r"(?i)\b(?:tpot|itl)\b|inter-token"),
    "e2e": Name("time", r"e2e(?: latency| time)?|(?:total|request) latency", r"(?i)\be2el?\b|end[- ]to[- ]end"),
    "output_tokens": Name(
        "n tokens",
        r"(?:output|completion|generated) tokens|(?:output|generation) len(?:gth)?",
        rf"{_N} (?:output|generated|new) tokens\b",
    ),
    "drafted": Name(
        "n",
        r"(?:draft|spec(?:ulative)?) len(?:gth)?|(?:num )?(?:speculative|draft(?:ed)?) tokens|gamma|k",
        rf"(?i){_N} (?:draft|speculative) tokens|\b(?:k|gamma) ?= ?{_N}|(?:draft|propos)(?:ing|e?s|ed)? {_N} tokens|"
        rf"{_N} tokens (?:are |were )?(?:drafted|proposed)\b",
    ),
    "accepted_length": Name(
        "n tokens token/item",
        r"accept(?:ed|ance)? len(?:gth)?|accepted(?: tokens)? (?:per|/) (?:step|pass|round)",
        r"(?i)accept(?:ed|ance) length (?:of |is |was |: ?)?(\d+\.\d+)",
    ),
    "emitted": Name(
        "n tokens token/item",
        rf"(?:tokens|toks?) ?(?:per|/) ?{_PASS}",
        rf"\b(\d+\.\d+) (?:accepted |emitted |output )?tokens (?:per|a|each|every) {_PASS}\b",
        most=99,
    ),
    # what a GPU does
    "registers": Name("n", r"(?<!limit )reg(?:ister)?s?(?: per thread)?", rf"{_N} reg(?:ister)?s\b"),
    "block_threads": Name(
        "n", r"block(?: size| dim)?|threads(?: per)?(?: block| cta)?", rf"{_N} threads\b(?! per SM)", 1024, 32
    ),
    "occupancy": Name("percent", r"theoretical|(?<!achieved )occup(?:ancy)?(?: %)?", r"(?i)theoretical occup"),
    "achieved_occupancy": Name("percent", r"achieved(?: occupancy)?"),
    "cycles": Name("cycles n", r"^(?:elapsed |sm )?cycles"),
    "sm_clock": Name("cycle/s", r"sm (?:frequency|clock)"),
    "duration": Name("time", r"(?:gpu |kernel )?duration"),
    "ipc": Name("n", r"(?:executed )?ipc(?: active| elapsed)?|inst(?:ructions)? per cycle"),
    "cores": Name("n", r"(?:fp32 |cuda )?cores(?: in total| total)?|total (?:fp32 |cuda )?cores"),
    "boost_clock": Name("cycle/s", r"(?:boost|max) clock(?: rate)?"),
    "fp32_peak": Name("rate", r"(?:theoretical|peak) (?:fp32|single)(?: precision)?|fp32 (?:theoretical|peak)"),
    "data_rate": Name("bandwidth", r"(?:effective )?(?:memory )?data rate|memory speed", r"(?:data rate|per pin)"),
    "bus_width": Name("n bytes", r"(?:memory )?(?:bus|interface)(?: width)?"),
    "peak_bandwidth": Name("bandwidth", r"(?:=> ?)?(?:theoretical|peak)(?: memory)?(?: bandwidth)?"),
    "flop": Name("flop n", r"flop|flop count"),
    "dram_bytes": Name("bytes", r"(?:dram|total|memory) bytes|bytes"),
    "flop_per_byte": Name("intensity", r"flops? per byte|arithmetic intensity|ai|intensity"),
    "allocated": Name("bytes", r"^(?:gi?b )?(?:mem(?:ory)? )?allocated(?: memory)?"),
    "reserved": Name("bytes", r"^(?:gi?b )?(?:mem(?:ory)? )?reserved(?: memory)?"),
    "clients": Name(
        "n",
        r"clients|users|connections|concurrency",
        rf"(?i){_N} (?:concurrent )?(?:clients|users|workers|connections)\b",
    ),
    "request_rate": Name(
        "items_per_s n",
        r"transactions/s|[tqr]ps|(?:request |req )?throughput(?: req s| rps| qps)?|"
        r"requests? (?:per|/) ?s(?:ec(?:ond)?)?|req s|requests/sec",
        r"(?i)req(?:uest)?s?(?:/s| per second)",
    ),
    "mean_latency": Name(
        "time",
        rf"latency (?:s |ms )?{_MEAN}|{_MEAN} (?:e2el? |request |response |end to end )?(?:latency|time|e2el)",
        rf"(?i)\b{_MEAN} (?:[\w-]+ )?(?:latency|response time)",
    ),
    "wer": Name("percent", r"wer(?: percent| pct)?|word error rate"),
    "substitutions": Name("n", r"sub(?:stitution)?s?"),
    "deletions": Name("n", r"del(?:etion)?s?"),
    "insertions": Name("n", r"ins(?:ertions?)?"),
    "words": Name("n", r"(?:n |num )?(?:ref(?:erence)? )?words|n ref"),
    "mean_power": Name(
        "power",
        rf"{_MEAN} (?:gpu |board )?(?:power|draw)(?: draw)?|power draw average",
        rf"(?i){_MEAN} (?:\w+ )?(?:power|draw)",
    ),
    "power_limit": Name("power", r"(?:enforced )?power limit(?: w)?|power cap"),
    "energy": Name("energy", r"energy(?: of the run| consumed| used)?", r"(?i)energy|drew|consum|used"),
    # input and output
    "mfu": Name("percent", r"mfu"),
    "gpu_flops": Name("rate n", r"t?flops?(?:/s)?(?: per |/)gpu|(?:achieved|model) t?flops?(?:/s)?|^achieved"),
    "peak_flops": Name("rate n", r"(?:dense )?peak(?: (?:bf16|fp16|fp8|dense|t?flops?(?:/s)?))*"),
    "batch": Name("n", rf"^(?:total |global )?{_BATCH}"),
    # parts of a whole, deviations
    "hits": Name("n", r"hits(?: total)?"),
    "misses": Name("n", r"misses(?: total)?"),
    "lookups": Name("n", r"(?:lookups|queries|accesses)(?: total)?"),
    "hit_share": Name("n percent", r"(?<!byte )hit (?:rate|ratio|share|fraction)", most=1.0),
    "top_1": Name("n percent", rf"(?:top ?|(?:pass|recall|acc|hits?)@)1{_ACCURACY}"),
    "top_5": Name("n percent", rf"(?:top ?|(?:pass|recall|acc|hits?)@)(?:5|10){_ACCURACY}"),
    "measured": Name("rate bandwidth", r"measured|achieved|actual|observed"),
    "roof": Name("rate bandwidth", r"roof(?:line)?|ceiling|bound|attainable"),
    "sample_rate": Name("items_per_s", r"(?:samples|images|img)(?:/| per )s(?:ec(?:ond)?)?"),
    "step_rate": Name("items_per_s", r"(?:steps|iterations|it)(?:/| per )s(?:ec(?:ond)?)?"),
}
