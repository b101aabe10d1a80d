"""The panel's labels, by language of the browser; the viewer has its own, beside the code that shows them."""

LABELS: dict[str, dict[str, str]] = {
    "en": {
        "preset": "Lesson", "model": "Model", "tier": "Tier", "run": "Run", "cancel": "Cancel",
        "details": "Requests, options, trace files, live server",
        "tab_engine": "Engine", "tab_kernel": "Kernel", "rung": "Rung of the ladder", "length": "Tokens in the context",
        "kernel_block_size": "Block size", "dtype": "Type",
        "watch": "Watch", "watch_url": "Watch a running server",
        "watch_info": "Started with `twinfer serve --enable-dev-endpoints`. Cancel ends it.",
        "watch_key": "API key", "watch_key_info": "Only if the server asks for one.", "save": "Save as trace files",
        "files": "Saved", "requests": "Requests (max_tokens tokens each, whatever they say)",
        "drafts": "drafts a step (0: no speculation)", "static": "static batching", "compare": "Compare with",
        "compare_info": "Changed options, one a line; empty for a single run. 0 in the form leaves an option to "
        "the engine.",
    },
    "zh": {
        "preset": "课程", "model": "模型", "tier": "实现", "run": "运行", "cancel": "取消",
        "details": "请求、选项、轨迹文件与实时服务器",
        "tab_engine": "引擎", "tab_kernel": "内核", "rung": "实现的级", "length": "上下文词元数",
        "kernel_block_size": "块大小", "dtype": "类型",
        "watch": "观看", "watch_url": "观看运行中的服务器",
        "watch_info": "用 `twinfer serve --enable-dev-endpoints` 启动。“取消”可结束观看。",
        "watch_key": "API 密钥", "watch_key_info": "仅当服务器要求时。", "save": "保存为轨迹文件", "files": "已保存",
        "requests": "请求（各生成 max_tokens 个词元）", "drafts": "每步草稿数（0：不投机）", "static": "静态批处理",
        "compare": "对照", "compare_info": "要改变的选项，每行一个；留空则只运行一次。表单中的 0 表示由引擎决定。",
    },
}  # fmt: skip
# Browsers ask for a region as well.
LABELS |= {f"zh-{region}": LABELS["zh"] for region in ("CN", "SG", "Hans")}
