import hooks from "eslint-plugin-react-hooks";
import tseslint from "typescript-eslint";

export default tseslint.config({ ignores: ["node_modules"] }, ...tseslint.configs.strict, {
  files: ["src/**/*.{ts,tsx}"],
  plugins: { "react-hooks": hooks },
  rules: {
    "react-hooks/rules-of-hooks": "error",
    "react-hooks/exhaustive-deps": "error",
    complexity: ["error", 12],
    "max-lines": ["error", 400],
    // What a model wrote is shown as text nodes only, and scripts that are made at run time break the page's policy.
    "no-restricted-properties": [
      "error",
      { property: "innerHTML" },
      { property: "outerHTML" },
      { property: "insertAdjacentHTML" },
      { object: "document", property: "write" },
    ],
    "no-restricted-syntax": [
      "error",
      { selector: "JSXAttribute[name.name='dangerouslySetInnerHTML']", message: "Text nodes only." },
    ],
    "no-eval": "error",
    "no-implied-eval": "error",
    "no-new-func": "error",
  },
});
