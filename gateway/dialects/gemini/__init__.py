"""Gemini's dialect: generateContent, countTokens and cachedContents."""
